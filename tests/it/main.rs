//! Integration tests: the real router and server over sockets, on SQLite and Postgres.

mod support;

mod batches;
mod client;
mod crash;
mod damage;
mod dashboards;
mod filters;
mod groups;
mod ingest;
mod ledger;
mod lineage;
mod model;
mod numbers;
mod operations;
mod policies;
mod replicas;
mod trainer_rule;
