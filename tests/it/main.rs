//! Integration tests: the real router and server over sockets, on SQLite and Postgres.

mod support;

mod access;
mod admissions;
mod arrow;
mod batches;
mod bench;
mod cancelled;
mod client;
mod commands;
mod crash;
mod damage;
mod dashboards;
mod direction;
mod faults;
mod files;
mod filters;
mod fuzz;
mod groups;
mod growth;
mod history;
mod hostile;
mod ingest;
mod keys;
mod ledger;
mod line;
mod lineage;
mod maintenance;
mod max_resumes;
// The peak memory of a process is available only on Linux.
#[cfg(target_os = "linux")]
mod memory;
mod messages;
mod model;
mod numbers;
mod openapi;
mod operations;
mod packaging;
mod policies;
mod pooler;
mod postgres;
mod readers;
mod replicas;
mod restore;
mod serving;
mod snippets;
mod staleness;
mod states;
mod steps;
mod tls;
mod traces;
mod trainer_rule;
mod turns;
mod upgrade;
mod waiters;
mod warnings;
