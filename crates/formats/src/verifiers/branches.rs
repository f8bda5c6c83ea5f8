//! Paths from a root to a leaf, as segments.

use forebay_wire::Segment;
use serde_json::value::RawValue;

use super::Node;
use crate::json::Problems;

/// The most nodes of all branches, which repeat what they share.
const BRANCH_NODES_MAX: usize = 1 << 22;

/// What the graph of a trace has.
#[derive(Default)]
pub(super) struct Branches<'t> {
    pub(super) segments: Vec<Segment>,
    /// The messages of the last branch.
    pub(super) messages: Vec<&'t RawValue>,
}

/// Makes a segment of each branch that trains a token which no earlier branch trains. `tokens_max` bounds the sum of all
/// branches, which repeat what they share.
pub(super) fn read<'t>(base: &str, nodes: &'t [Node], tokens_max: usize, problems: &mut Problems) -> Branches<'t> {
    check(base, nodes, problems);
    let leaves = leaves(nodes);
    let tokens = total(nodes, &leaves, |node| node.token_ids.len());
    if total(nodes, &leaves, |_| 1) > BRANCH_NODES_MAX {
        problems.push(format!("{base}/nodes"), format!("the branches have more than {BRANCH_NODES_MAX} nodes"));
    }
    if tokens > tokens_max {
        problems.push(
            format!("{base}/nodes"),
            format!("the branches have {tokens} tokens, but at most {tokens_max} may be"),
        );
    }
    if !problems.is_empty() {
        return Branches::default();
    }
    let mut owned = vec![false; nodes.len()];
    let mut branches = Branches::default();
    for (index, &leaf) in leaves.iter().enumerate() {
        let path = path(nodes, leaf);
        let is_last = index + 1 == leaves.len();
        if let Some(segment) = segment(base, nodes, &path, &mut owned, is_last, problems) {
            branches.segments.push(segment);
        }
        if is_last {
            branches.messages = path.iter().filter_map(|&node| nodes[node].message.as_deref()).collect();
        }
    }
    branches
}

fn check(base: &str, nodes: &[Node], problems: &mut Problems) {
    let trains = |node: &Node| node.mask.contains(&true);
    let some_logprobs = nodes.iter().any(|node| !node.logprobs.is_empty());
    for (index, node) in nodes.iter().enumerate() {
        let at = format!("{base}/nodes/{index}");
        if node.parent.is_some_and(|parent| parent >= index) {
            problems.push(format!("{at}/parent"), "must be an earlier node");
        }
        if node.mask.len() != node.token_ids.len() {
            let detail = format!("has {} entries for {} tokens", node.mask.len(), node.token_ids.len());
            problems.push(format!("{at}/mask"), detail);
        }
        let sampled = node.mask.iter().filter(|&&is_sampled| is_sampled).count();
        if !node.logprobs.is_empty() && node.logprobs.len() != sampled {
            let detail = format!("has {} entries for {sampled} sampled tokens", node.logprobs.len());
            problems.push(format!("{at}/logprobs"), detail);
        }
        if some_logprobs && trains(node) && node.logprobs.is_empty() {
            problems.push(format!("{at}/logprobs"), "is needed, because other nodes have it");
        }
    }
}

/// Nodes that are no node's parent, in their order.
fn leaves(nodes: &[Node]) -> Vec<usize> {
    let mut is_parent = vec![false; nodes.len()];
    for parent in nodes.iter().filter_map(|node| node.parent) {
        if let Some(entry) = is_parent.get_mut(parent) {
            *entry = true;
        }
    }
    (0..nodes.len()).filter(|&node| !is_parent[node]).collect()
}

/// The sum of a quantity over the nodes of all branches.
fn total(nodes: &[Node], leaves: &[usize], quantity: fn(&Node) -> usize) -> usize {
    let mut up_to: Vec<usize> = Vec::with_capacity(nodes.len());
    for node in nodes {
        let before = node.parent.and_then(|parent| up_to.get(parent)).copied().unwrap_or(0);
        up_to.push(before.saturating_add(quantity(node)));
    }
    leaves.iter().fold(0, |sum, &leaf| sum.saturating_add(up_to[leaf]))
}

/// The nodes from the root to a leaf.
fn path(nodes: &[Node], leaf: usize) -> Vec<usize> {
    let mut path: Vec<usize> = std::iter::successors(Some(leaf), |&node| nodes[node].parent).collect();
    path.reverse();
    path
}

/// The segment of a branch: the response begins with the first token that it trains.
fn segment(
    base: &str,
    nodes: &[Node],
    path: &[usize],
    owned: &mut [bool],
    is_last: bool,
    problems: &mut Problems,
) -> Option<Segment> {
    let mut segment = Segment::default();
    let mut logprobs = Vec::new();
    for &index in path {
        let node = &nodes[index];
        let trains_here = !std::mem::replace(&mut owned[index], true);
        let mut values = node.logprobs.iter().copied();
        for (&id, &is_sampled) in node.token_ids.iter().zip(&node.mask) {
            let logprob = if is_sampled { values.next() } else { None };
            let is_trained = is_sampled && trains_here;
            if is_trained && segment.tokens.is_empty() {
                problems.push(
                    format!("{base}/nodes/{index}/token_ids"),
                    "begins with a sampled token: a segment needs a prompt of at least one token",
                );
                return None;
            }
            segment.tokens.push(id);
            if is_trained || !segment.loss_mask.is_empty() {
                segment.loss_mask.push(u8::from(is_trained));
                logprobs.push(logprob.filter(|_| is_trained).unwrap_or(0.0));
            }
        }
    }
    if segment.loss_mask.is_empty() {
        return None;
    }
    let has_logprobs = nodes.iter().any(|node| !node.logprobs.is_empty());
    let kind = if is_last { "final" } else { "branch" };
    Some(Segment { kind: Some(kind.to_owned()), logprobs: has_logprobs.then_some(logprobs), ..segment })
}
