//! The ids of a session's recorded calls as a tree, so that a prompt is stored as the part that no earlier call has.
//!
//! The tree is only a cache. It is built from the stored calls if it is missing, and a tree that lacks calls of another
//! replica only makes stored prompts longer. The assembler decides by itself which call continues which one.

use std::collections::{HashMap, HashSet};

/// The paths of the calls of one policy in a session.
#[derive(Debug, Default)]
pub struct CallPaths {
    nodes: Vec<Node>,
    /// The next nodes, by the first id on the way to them.
    next: HashMap<(usize, i32), usize>,
    /// Calls that another call continues.
    continued: HashSet<u32>,
    ids: usize,
}

#[derive(Debug)]
struct Node {
    /// The ids between the node before and this one.
    way: Vec<i32>,
    /// A call whose path passes.
    call: u32,
    /// The call whose path ends here.
    full: Option<u32>,
    /// The call whose path ends here without its last id, which is a stop token.
    trimmed: Option<u32>,
}

/// What a prompt has in common with the recorded calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shared {
    /// A call that begins with the same ids; none if no call does.
    pub call: Option<u32>,
    /// The number of these ids.
    pub ids: usize,
    /// The call that the prompt is the first to continue, and where its path ends.
    pub continues: Option<(u32, usize)>,
}

impl CallPaths {
    /// The number of ids that the tree holds.
    pub fn ids(&self) -> usize {
        self.ids
    }

    /// The longest beginning of a prompt that recorded calls have.
    pub fn shared(&self, prompt: &[i32]) -> Shared {
        let (mut at, mut depth) = (usize::MAX, 0);
        let mut shared = Shared::default();
        let mut end = None;
        while let Some(&next) = prompt.get(depth).and_then(|&first| self.next.get(&(at, first))) {
            let node = &self.nodes[next];
            let common = common(&node.way, &prompt[depth..]);
            depth += common;
            (shared.call, shared.ids) = (Some(node.call), depth);
            if common < node.way.len() {
                break;
            }
            // A stop token is only left out where another id follows.
            if let Some(call) = node.full.or(node.trimmed.filter(|_| depth < prompt.len())) {
                end = Some((call, depth));
                shared.call = Some(call);
            }
            at = next;
        }
        shared.continues = end.filter(|(call, _)| !self.continued.contains(call));
        shared
    }

    /// Adds the path of a call: its prompt and its ids.
    pub fn add(&mut self, call: u32, prompt: &[i32], ids: &[i32], stopped_on_token: bool) {
        if let Some((before, _)) = self.shared(prompt).continues {
            self.continued.insert(before);
        }
        let Some((last, before_last)) = ids.split_last() else { return };
        let path: Vec<i32> = prompt.iter().chain(before_last).copied().collect();
        let trimmed = self.extend(usize::MAX, &path, call);
        // A call of one id is continued with that id, or not at all.
        if stopped_on_token && !before_last.is_empty() {
            self.nodes[trimmed].trimmed.get_or_insert(call);
        }
        let full = self.extend(trimmed, &[*last], call);
        self.nodes[full].full.get_or_insert(call);
    }

    /// The node at the end of these ids. What the tree lacks is added.
    fn extend(&mut self, from: usize, ids: &[i32], call: u32) -> usize {
        let (mut at, mut rest) = (from, ids);
        while let Some(&first) = rest.first() {
            let Some(&next) = self.next.get(&(at, first)) else {
                self.ids += rest.len();
                return self.append(at, Node { way: rest.to_vec(), call, full: None, trimmed: None });
            };
            let common = common(&self.nodes[next].way, rest);
            at = if common == self.nodes[next].way.len() { next } else { self.split(at, next, common) };
            rest = &rest[common..];
        }
        at
    }

    fn append(&mut self, above: usize, node: Node) -> usize {
        let added = self.nodes.len();
        self.next.insert((above, node.way[0]), added);
        self.nodes.push(node);
        added
    }

    /// Adds a node on the way to another one.
    fn split(&mut self, above: usize, below: usize, at: usize) -> usize {
        let tail = self.nodes[below].way.split_off(at);
        let head = std::mem::replace(&mut self.nodes[below].way, tail);
        let call = self.nodes[below].call;
        let middle = self.append(above, Node { way: head, call, full: None, trimmed: None });
        self.next.insert((middle, self.nodes[below].way[0]), below);
        middle
    }
}

/// The number of ids that both begin with.
fn common(one: &[i32], other: &[i32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_shares_the_longest_beginning() {
        let mut paths = CallPaths::default();
        assert_eq!(paths.shared(&[1, 2]), Shared::default());
        paths.add(1, &[1, 2, 3], &[11, 12, 9], true);
        // All of the call, all but its stop token, and a part of its prompt.
        let continued = |ids| Shared { call: Some(1), ids, continues: Some((1, ids)) };
        assert_eq!(paths.shared(&[1, 2, 3, 11, 12, 9, 8]), continued(6));
        assert_eq!(paths.shared(&[1, 2, 3, 11, 12, 2]), continued(5));
        assert_eq!(paths.shared(&[1, 2, 3, 11, 12]), Shared { call: Some(1), ids: 5, continues: None });
        assert_eq!(paths.shared(&[1, 2, 5]), Shared { call: Some(1), ids: 2, continues: None });
        paths.add(2, &[1, 2, 3, 11, 12, 9, 8], &[13], false);
        // The first call is continued already, and the second one is not.
        let fork = paths.shared(&[1, 2, 3, 11, 12, 9, 7]);
        assert_eq!(fork, Shared { call: Some(1), ids: 6, continues: None });
        assert_eq!(paths.shared(&[1, 2, 3, 11, 12, 9, 8, 13, 4]).continues, Some((2, 8)));
        assert_eq!(paths.ids(), 8, "every id is held once");
    }
}
