//! The mode exact in a build without the feature `exact`: it cannot be configured.

use forebay_gateway::{
    DialectError, Request,
    cancel::Cancellation,
    canonical::Continued,
    system::LaterSystem,
    upstream::{EngineKind, ExactPrompt, Upstream, UpstreamError},
};

use crate::configured::ExactConfig;

/// The tokenizer and the template of an engine's model, which this build cannot load.
#[derive(Debug)]
pub(crate) enum Exact {}

impl Exact {
    pub(crate) fn load(_: &str, _: &ExactConfig, _: EngineKind) -> Result<Self, String> {
        Err("this program was built without its feature `exact`, which has the mode exact".to_owned())
    }

    pub(crate) fn prompt(
        &self,
        _: &Request,
        _: i64,
        _: Option<&Continued>,
        _: usize,
        _: &Cancellation,
        _: &dyn Fn(usize) -> bool,
    ) -> Result<Option<(Vec<i32>, u64)>, DialectError> {
        match *self {}
    }

    pub(crate) fn text(&self, _: &[i32]) -> String {
        match *self {}
    }

    pub(crate) fn whole_text(&self, _: &[i32]) -> String {
        match *self {}
    }

    pub(crate) fn later_system(&self) -> LaterSystem {
        match *self {}
    }

    pub(crate) fn probe(&self) -> (&Request, &[i32]) {
        match *self {}
    }

    #[expect(clippy::unused_async, reason = "it has the signature of the one that asks an engine")]
    pub(crate) async fn compare(&self, _: &Upstream, _: &str) -> Result<Option<String>, UpstreamError> {
        match *self {}
    }

    pub(crate) fn ids<'a>(&'a self, _: &'a [i32], _: &'a (dyn Fn(&[i32]) -> String + Sync)) -> ExactPrompt<'a> {
        match *self {}
    }
}
