"""Runs everything of one training on one machine: the service, engines, trainers and the agents' program.

`settings` reads the run file, `command` is the command line, `stages` has the order, `processes` keeps processes
alive, `progress` says how training goes, and `program` is what the agents' program sees of all this. The service and
the trainer know nothing of it. Where something else starts the processes, `compose` writes its file, and `roles` does
what only the runner can do.
"""
