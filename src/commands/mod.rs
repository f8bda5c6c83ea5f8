//! The subcommands of the binary.

pub(crate) mod serve;

pub(crate) mod demo;

pub(crate) mod keys;

pub(crate) mod import;

pub(crate) mod maintenance;
mod media;

pub(crate) mod export;

pub(crate) mod bench;

pub(crate) mod service;

pub(crate) mod why;

pub(crate) mod score;

pub(crate) mod top;

mod text;
