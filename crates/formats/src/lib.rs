//! Import formats: recorded agent runs of other projects become trajectories of the API.
//!
//! Everything here is a pure function of bytes, so that `forebay import` and `POST /imports/{format}` give the same
//! results. A source is a file or a body. [`Importer`] cuts it into documents, and the [`Reader`] of a [`Format`] makes
//! trajectories of each document, or says where the document is wrong. [`FORMATS`] lists the formats, each of which has
//! a file of its own.
//!
//! The modules, in reading order: `format` (what a format is), `importer` (from bytes to records), `options` (what a
//! caller may say about all rollouts), `labels` (whose rollout it is, from the options, the record or the format),
//! `ids` (ids of records that have none), `json` (errors with pointers), `tools` (definitions of
//! tools in the metadata), `turns` (prompts without what an earlier call has),
//! `groups` (groups with more rollouts than places), and the formats.
//!
//! What a format makes of a document is a part of the content of a rollout, as are ids, which follow from the document
//! alone. It must stay the same in later versions, or a repeated import would be a conflict.

mod format;
mod groups;
mod ids;
mod importer;
mod json;
mod labels;
mod options;
mod tools;
mod turns;

#[cfg(test)]
mod golden;

mod atif;
mod chat;
mod forebay;
mod nemo_gym;
mod verifiers;

pub use self::{
    format::{Document, Format, Imported, Layout, Note, Reader, Record},
    groups::{GroupSizes, Overfull},
    ids::digest_id,
    importer::{DOCUMENT_BYTES_MAX, Importer},
    options::{Options, ROLLOUT_TOKENS_MAX},
};

/// Every format, in the order of their names.
pub const FORMATS: &[Format] = &[atif::FORMAT, chat::FORMAT, forebay::FORMAT, nemo_gym::FORMAT, verifiers::FORMAT];

#[must_use]
pub fn format(name: &str) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.name == name)
}

/// The names of all formats, as a sentence can list them.
#[must_use]
pub fn names() -> String {
    let names: Vec<&str> = FORMATS.iter().map(|format| format.name).collect();
    names.join(", ")
}
