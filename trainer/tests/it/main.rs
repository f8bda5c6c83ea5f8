//! Integration tests of the trainer, in one binary because linking libtorch is slow.

mod golden;
mod support;

mod agents;
mod chaos;
mod checkpoint;
mod config;
mod crash;
mod decoding;
mod engine;
mod facades;
mod generate;
mod lifecycle;
mod logprobs;
mod objectives;
mod output;
mod parity;
mod recompute;
mod refusals;
mod rollout;
mod saved;
mod serve;
mod wandb;
