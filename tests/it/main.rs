//! Integration tests: the real router and server over sockets, on SQLite and Postgres.

mod support;

mod access;
mod batches;
mod client;
mod crash;
mod damage;
mod dashboards;
mod filters;
mod groups;
mod ingest;
mod keys;
mod ledger;
mod lineage;
mod numbers;
mod operations;
mod policies;
mod replicas;
mod tls;
mod trainer_rule;
