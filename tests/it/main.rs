//! Integration tests: the real router and server over sockets, on SQLite and Postgres.

mod support;

mod ingest;
mod groups;
mod filters;
mod batches;
mod lineage;
mod policies;
mod ledger;
mod numbers;
mod operations;
mod trainer_rule;
mod damage;
mod replicas;
mod crash;
