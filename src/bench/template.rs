//! Bodies that cost nothing to make: they are written before the run, with gaps for the name of their group.
//!
//! Separate from the protocols, so that none of them can spend the generator's time while the load runs. Previous:
//! [`super::workload`]; next: [`super::load`].

use bytes::Bytes;
use serde::Serialize;

use super::{
    protocol::Protocol,
    workload::{Rollout, Workload, WorkloadArgs},
};

/// Different groups that are written before the run: enough that nothing repeats soon.
const GROUPS_MAX: usize = 64;

/// Bytes of templates at which there are enough of them, so that long rollouts do not fill the memory.
const BYTES_MAX: usize = 64 << 20;

/// A body with gaps for the name of its group.
pub(crate) struct Template {
    /// The name goes between each two.
    pieces: Vec<String>,
    /// Tokens of each rollout, or words where it is text.
    lengths: Vec<u64>,
}

impl Template {
    pub(crate) fn new() -> Self {
        Self { pieces: vec![String::new()], lengths: Vec::new() }
    }

    /// Where text is appended.
    pub(crate) fn text(&mut self) -> &mut String {
        self.pieces.last_mut().expect("there is always a piece")
    }

    /// Here goes the name of the group.
    pub(crate) fn gap(&mut self) {
        self.pieces.push(String::new());
    }

    /// Counts a rollout that was written.
    pub(crate) fn count(&mut self, rollout: &Rollout) {
        self.lengths.push(rollout.length());
    }

    fn bytes(&self) -> usize {
        self.pieces.iter().map(String::len).sum()
    }

    fn fill(&self, name: &str) -> Bytes {
        let mut body = Vec::with_capacity(self.bytes() + name.len() * self.pieces.len());
        for (index, piece) in self.pieces.iter().enumerate() {
            if index > 0 {
                body.extend_from_slice(name.as_bytes());
            }
            body.extend_from_slice(piece.as_bytes());
        }
        body.into()
    }
}

/// One post.
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    pub(crate) media: &'static str,
    pub(crate) rollouts: u64,
    /// Tokens, or words where it is text.
    pub(crate) tokens: u64,
}

/// All bodies of a run, by their number.
pub(crate) struct Bodies {
    /// Each group in one or more bodies.
    groups: Vec<Vec<Template>>,
    media: &'static str,
    /// No other run has the same names, or its posts would be taken for repeats.
    run: String,
}

impl Bodies {
    pub(crate) fn new(args: &WorkloadArgs, protocol: &dyn Protocol) -> Self {
        let mut workload = Workload::new(args.clone());
        let (mut groups, mut bytes) = (Vec::new(), 0);
        while groups.len() < GROUPS_MAX && bytes < BYTES_MAX {
            let templates = protocol.templates(&workload.group(), args.per_body);
            bytes += templates.iter().map(Template::bytes).sum::<usize>();
            groups.push(templates);
        }
        Self { groups, media: protocol.media(), run: format!("{:08x}", rand::random::<u32>()) }
    }

    /// The body with this number: the only place where bodies are made.
    pub(crate) fn body(&self, number: u64) -> Body {
        let per_group = self.groups[0].len() as u64;
        let (group, part) = (number / per_group, number % per_group);
        let template = &self.groups[group as usize % self.groups.len()][part as usize];
        let bytes = template.fill(&format!("bench-{}-{group}", self.run));
        let (rollouts, tokens) = (template.lengths.len() as u64, template.lengths.iter().sum());
        Body { bytes, media: self.media, rollouts, tokens }
    }

    pub(crate) fn summary(&self) -> BodySummary {
        let templates = || self.groups.iter().flatten();
        let mut lengths: Vec<u64> = templates().flat_map(|template| template.lengths.iter().copied()).collect();
        lengths.sort_unstable();
        let at = |share: f64| lengths[(share * (lengths.len() - 1) as f64).round() as usize];
        BodySummary {
            templates: templates().count(),
            bytes_mean: templates().map(Template::bytes).sum::<usize>() / templates().count(),
            rollout_tokens: Lengths {
                mean: lengths.iter().sum::<u64>() / lengths.len() as u64,
                p50: at(0.5),
                p99: at(0.99),
                max: at(1.0),
            },
        }
    }
}

/// What the bodies of a run turned out to be.
#[derive(Debug, Serialize)]
pub(crate) struct BodySummary {
    /// Different bodies; names apart, they repeat in turn.
    pub(crate) templates: usize,
    pub(crate) bytes_mean: usize,
    /// Tokens of a rollout, or words where it is text.
    pub(crate) rollout_tokens: Lengths,
}

/// Lengths of rollouts.
#[derive(Debug, Serialize)]
pub(crate) struct Lengths {
    pub(crate) mean: u64,
    pub(crate) p50: u64,
    pub(crate) p99: u64,
    pub(crate) max: u64,
}
