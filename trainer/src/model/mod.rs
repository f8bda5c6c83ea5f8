//! Decoder-only language models, with the names and the arithmetic of their
//! checkpoints.
//!
//! A [`Decoder`] is built from a [`ModelConfig`] and owns its [`Parameters`]. Training runs whole sequences through
//! [`Decoder::hidden`], or through [`Decoder::hidden_recomputed`] if the activations of all layers do not fit in
//! memory. Sampling runs sequences piece by piece through [`Decoder::extend`] with a [`KvCache`], or, in a server, through
//! an [`InferenceModel`] with a [`SequenceCache`] for each sequence.

mod config;
mod parameters;

mod decoder;
mod layers;
mod rope;

mod cache;
mod inference;
mod recompute;

pub use cache::KvCache;
pub use config::{Architecture, ConfigError, ModelConfig};
pub use decoder::{ComputeKind, Decoder, LoadError};
pub use inference::{InferenceModel, Piece, SequenceCache};
pub use parameters::Parameters;
pub use recompute::Recomputed;
pub use rope::RopeScaling;

pub(crate) use parameters::{Head, ParameterSpec, layout};
