//! Models that score the segments of sessions, so that other models learn from them.

use async_trait::async_trait;
use forebay_domain::ids::SessionId;

/// Scores segments. No operation of the store is in progress meanwhile.
#[async_trait]
pub trait Teachers: Send + Sync + 'static {
    /// Whether there is a teacher with this name.
    fn knows(&self, teacher: &str) -> bool;
    /// Whether a teacher can score now what is sampled at this temperature.
    async fn check(&self, teacher: &str, temperature: f32) -> Result<(), TeacherFault>;
    /// For each segment, the log-probability of each id behind its prompt, all of them finite and none above zero.
    async fn score(
        &self,
        teacher: &str,
        session: SessionId,
        temperature: f32,
        segments: &[Unscored<'_>],
    ) -> Result<Vec<Vec<f32>>, TeacherFault>;
}

/// A segment without scores.
#[derive(Clone, Copy, Debug)]
pub struct Unscored<'a> {
    pub ids: &'a [i32],
    /// How many of them are the prompt.
    pub prompt: usize,
}

/// Why nothing is scored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TeacherFault {
    /// No teacher has this name.
    #[error("the configuration has no [[upstream]] with this name")]
    Unknown,
    /// The teacher cannot score what is sampled at this temperature.
    #[error("{0}")]
    Unsuited(String),
    /// The teacher does not answer, or its answer is no score.
    #[error("{0}")]
    Failed(String),
}

impl TeacherFault {
    /// The name in metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Unsuited(_) => "unsuited",
            Self::Failed(_) => "failed",
        }
    }
}

/// No teachers at all.
#[derive(Clone, Copy, Debug)]
pub struct NoTeachers;

#[async_trait]
impl Teachers for NoTeachers {
    fn knows(&self, _teacher: &str) -> bool {
        false
    }

    async fn check(&self, _teacher: &str, _temperature: f32) -> Result<(), TeacherFault> {
        Err(TeacherFault::Unknown)
    }

    async fn score(
        &self,
        _teacher: &str,
        _session: SessionId,
        _temperature: f32,
        _segments: &[Unscored<'_>],
    ) -> Result<Vec<Vec<f32>>, TeacherFault> {
        Err(TeacherFault::Unknown)
    }
}
