//! Formats that are stored or hashed. Two versions of the service must agree on all of them.

pub mod canonical;

pub mod call;
pub mod codes;

pub mod columns;

pub mod logprobs;

pub mod payload;

pub mod seal;

#[cfg(test)]
mod golden;
