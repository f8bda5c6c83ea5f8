//! Integration tests: the real router and server over sockets, on SQLite and Postgres.

mod support;

mod admissions;
mod batches;
mod cancelled;
mod client;
mod crash;
mod damage;
mod dashboards;
mod filters;
mod fuzz;
mod groups;
mod hostile;
mod ingest;
mod ledger;
mod lineage;
mod numbers;
mod operations;
mod policies;
mod replicas;
mod staleness;
mod trainer_rule;
