//! The ids of all calls as one tree. What several calls begin with is one path in it.
//!
//! Most prompts repeat the whole conversation before them. In the tree, two calls are compared by comparing positions,
//! and a prompt that is given as the ids behind another call costs only these ids.

use std::collections::HashMap;

/// A position in the tree, which stands for the ids from the beginning to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Position(u32);

impl Position {
    /// The position before all ids.
    pub(super) const BEGINNING: Self = Self(0);

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The tree. Its positions are the places where the ids of a call end or where two paths part.
#[derive(Debug)]
pub(super) struct Paths<'a> {
    nodes: Vec<Node<'a>>,
    /// The next positions, by the first id on the way to them.
    next: HashMap<(Position, i32), Position>,
    /// Ids that were compared or added so far.
    #[cfg(test)]
    pub(super) ids_read: usize,
}

#[derive(Debug)]
struct Node<'a> {
    above: Position,
    /// The ids between the position above and this one.
    way: &'a [i32],
    /// The number of ids from the beginning.
    depth: usize,
}

impl Default for Paths<'_> {
    fn default() -> Self {
        Self {
            nodes: vec![Node { above: Position::BEGINNING, way: &[], depth: 0 }],
            next: HashMap::new(),
            #[cfg(test)]
            ids_read: 0,
        }
    }
}

impl<'a> Paths<'a> {
    /// The position that is reached from another one through these ids. What the tree lacks is added.
    pub(super) fn extend(&mut self, from: Position, ids: &'a [i32]) -> Position {
        #[cfg(test)]
        {
            self.ids_read += ids.len();
        }
        let (mut at, mut rest) = (from, ids);
        while let Some(&first) = rest.first() {
            let Some(&next) = self.next.get(&(at, first)) else {
                return self.add(at, rest);
            };
            let way = self.nodes[next.index()].way;
            let common = way.iter().zip(rest).take_while(|(known, id)| known == id).count();
            at = if common == way.len() { next } else { self.split(next, common) };
            rest = &rest[common..];
        }
        at
    }

    fn add(&mut self, above: Position, way: &'a [i32]) -> Position {
        let added = Position(self.nodes.len() as u32);
        self.nodes.push(Node { above, way, depth: self.depth(above) + way.len() });
        self.next.insert((above, way[0]), added);
        added
    }

    /// Adds a position on the way to another one.
    fn split(&mut self, below: Position, at: usize) -> Position {
        let Node { above, way, .. } = self.nodes[below.index()];
        let (head, tail) = way.split_at(at);
        let middle = self.add(above, head);
        let node = &mut self.nodes[below.index()];
        (node.above, node.way) = (middle, tail);
        self.next.insert((middle, tail[0]), below);
        middle
    }

    /// The number of ids from the beginning to a position.
    pub(super) fn depth(&self, at: Position) -> usize {
        self.nodes[at.index()].depth
    }

    /// The position before this one; none at the beginning.
    pub(super) fn above(&self, at: Position) -> Option<Position> {
        Some(self.nodes[at.index()].above).filter(|_| at != Position::BEGINNING)
    }

    /// All positions, each after the one above it.
    pub(super) fn downwards(&self) -> Vec<Position> {
        let mut order: Vec<Position> = (0..self.nodes.len() as u32).map(Position).collect();
        order.sort_unstable_by_key(|&at| self.depth(at));
        order
    }

    /// The ids from the beginning to a position.
    pub(super) fn ids(&self, to: Position) -> Vec<i32> {
        let mut ids = vec![0; self.depth(to)];
        let mut at = to;
        while let Some(above) = self.above(at) {
            let Node { way, depth, .. } = self.nodes[at.index()];
            ids[depth - way.len()..depth].copy_from_slice(way);
            at = above;
        }
        ids
    }
}
