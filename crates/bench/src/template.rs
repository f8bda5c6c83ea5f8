//! Templates of bodies. They are written before the run, with gaps for the name of their group, so that a body costs
//! little to make during the run.
//!
//! This is separate from the protocols, so that no protocol can use the generator's time during the run. The previous
//! module is [`crate::workload`], the next [`crate::load`](mod@crate::load).

use bytes::Bytes;
use serde::Serialize;

use crate::{
    protocol::Protocol,
    workload::{Rollout, Workload, WorkloadArgs},
};

/// Maximum number of different groups that are written before the run.
const GROUPS_MAX: usize = 64;

/// Total bytes of templates after which no more are written, so that long rollouts do not fill the memory.
const BYTES_MAX: usize = 64 << 20;

/// Placeholder for the name of a group in binary bodies. All names have the same length as this, because such a body
/// contains lengths in bytes.
pub(crate) const NAME: &str = "bench-????????????-????????";

/// Factor that scrambles numbers below [`NUMBERS`]. It is odd, so that different numbers stay different.
const SCRAMBLE: u64 = 0x9E37_79B9_7F4B;

/// Number of groups that can have different names: as many as twelve hexadecimal digits can express.
const NUMBERS: u64 = 1 << 48;

/// A body with gaps for the name of its group.
pub(crate) struct Template {
    /// The name is inserted between each two parts.
    pieces: Pieces,
    /// Number of tokens of each rollout, or of words of texts.
    lengths: Vec<u64>,
}

/// The parts of a body around its gaps.
enum Pieces {
    Text(Vec<String>),
    Binary(Vec<Vec<u8>>),
}

impl Template {
    /// An empty text, to which text is appended.
    pub(crate) fn new() -> Self {
        Self { pieces: Pieces::Text(vec![String::new()]), lengths: Vec::new() }
    }

    /// A complete body that contains [`NAME`] in place of the name of its group.
    pub(crate) fn of_bytes(body: &[u8]) -> Self {
        let (mut pieces, mut rest) = (Vec::new(), body);
        while let Some(at) = rest.windows(NAME.len()).position(|window| window == NAME.as_bytes()) {
            pieces.push(rest[..at].to_vec());
            rest = &rest[at + NAME.len()..];
        }
        pieces.push(rest.to_vec());
        Self { pieces: Pieces::Binary(pieces), lengths: Vec::new() }
    }

    fn texts(&mut self) -> &mut Vec<String> {
        match &mut self.pieces {
            Pieces::Text(texts) => texts,
            Pieces::Binary(_) => unreachable!("nothing is appended to a body that is whole"),
        }
    }

    /// The last part of the text, to which text is appended.
    pub(crate) fn text(&mut self) -> &mut String {
        self.texts().last_mut().expect("there is always a piece")
    }

    /// Adds a gap for the name of the group.
    pub(crate) fn gap(&mut self) {
        self.texts().push(String::new());
    }

    /// Counts a rollout that was written.
    pub(crate) fn count(&mut self, rollout: &Rollout) {
        self.lengths.push(rollout.length());
    }

    fn pieces(&self) -> Vec<&[u8]> {
        match &self.pieces {
            Pieces::Text(texts) => texts.iter().map(String::as_bytes).collect(),
            Pieces::Binary(pieces) => pieces.iter().map(Vec::as_slice).collect(),
        }
    }

    fn bytes(&self) -> usize {
        self.pieces().iter().map(|piece| piece.len()).sum()
    }

    fn fill(&self, name: &str) -> Bytes {
        self.pieces().join(name.as_bytes()).into()
    }
}

/// One post.
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    pub(crate) media: &'static str,
    pub(crate) rollouts: u64,
    /// Number of tokens, or of words of texts.
    pub(crate) tokens: u64,
}

/// All bodies of a run, by their number.
pub(crate) struct Bodies {
    /// The templates of each group, in one or more bodies.
    groups: Vec<Vec<Template>>,
    media: &'static str,
    /// Part of all names of this run. It differs from that of other runs, whose posts would otherwise be repeats.
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

    /// Makes the body with this number.
    pub(crate) fn body(&self, number: u64) -> Body {
        let per_group = self.groups[0].len() as u64;
        let (group, part) = (number / per_group, number % per_group);
        let template = &self.groups[group as usize % self.groups.len()][part as usize];
        // The order of names is random, like that of real tasks, so each changes another page of an index.
        let scrambled = group.wrapping_mul(SCRAMBLE) % NUMBERS;
        let bytes = template.fill(&format!("bench-{scrambled:012x}-{}", self.run));
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

/// Statistics of the bodies of a run.
#[derive(Debug, Serialize)]
pub(crate) struct BodySummary {
    /// Number of different bodies, without the names. They are used in turn.
    pub(crate) templates: usize,
    pub(crate) bytes_mean: usize,
    /// Number of tokens of a rollout, or of words of texts.
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
