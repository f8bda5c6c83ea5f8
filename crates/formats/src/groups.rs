//! Groups of sources that have more rollouts than places. The service would store the others as late, without their
//! tokens and texts, so an import looks for such groups before it stores anything.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    hash::{BuildHasher as _, RandomState},
    io::{self, BufRead},
};

use forebay_wire::Trajectory;

use crate::importer::Importer;

/// The group with the most rollouts, if that is more than its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overfull {
    pub group_id: String,
    /// How many rollouts the sources have of it.
    pub rollouts: u64,
    /// How many rollouts it may have.
    pub size: u32,
}

impl fmt::Display for Overfull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group_id, rollouts, size } = self;
        write!(
            f,
            "the group {group_id} has {rollouts} rollouts and the size {size}: the other rollouts would be late, and a \
             late rollout loses its tokens and messages"
        )
    }
}

/// Counts the rollouts of each group of several sources. It holds numbers for each group and each rollout, and nothing
/// else. Groups whose size only the rules of their policy say are not counted.
#[derive(Debug, Default)]
pub struct GroupSizes {
    // A collision of two hashes of 64 bits would count a rollout too much or too little, once in billions of sources.
    hashes: RandomState,
    groups: HashMap<u64, u64>,
    rollouts: HashSet<u64>,
    most: Option<Overfull>,
}

impl GroupSizes {
    /// Reads a source to its end.
    pub fn read<R: BufRead>(&mut self, mut importer: Importer<R>) -> io::Result<()> {
        while let Some(record) = importer.next_record()? {
            record.outcome.iter().flat_map(|imported| &imported.trajectories).for_each(|rollout| self.count(rollout));
        }
        Ok(())
    }

    fn count(&mut self, trajectory: &Trajectory) {
        let (Some(group_id), Some(size)) = (&trajectory.group_id, trajectory.group_size) else { return };
        let group = (&trajectory.policy, group_id);
        if !self.rollouts.insert(self.hashes.hash_one((group, &trajectory.rollout_id))) {
            return;
        }
        let rollouts = self.groups.entry(self.hashes.hash_one(group)).or_default();
        *rollouts += 1;
        if *rollouts > u64::from(size) && self.most.as_ref().is_none_or(|most| *rollouts > most.rollouts) {
            self.most = Some(Overfull { group_id: group_id.clone(), rollouts: *rollouts, size });
        }
    }

    /// The group that exceeds its size most, if one does.
    #[must_use]
    pub fn overfull(self) -> Option<Overfull> {
        self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    #[test]
    fn the_fullest_group_of_all_sources_is_found_and_repeats_do_not_count() {
        let line = |group: &str, rollout: &str| {
            format!(r#"{{"group_id":"{group}","rollout_id":"{rollout}","reward":1,"messages":[]}}"#)
        };
        let lines = [("a", "1"), ("b", "2"), ("b", "3"), ("b", "3"), ("c", "1"), ("b", "4"), ("a", "5")];
        let source = lines.map(|(group, rollout)| line(group, rollout)).join("\n");
        let find = |group_size| {
            let options = Options { group_size, ..Options::default() };
            let mut sizes = GroupSizes::default();
            for line in source.lines() {
                let importer = Importer::new(&crate::chat::FORMAT, &options, line.as_bytes());
                sizes.read(importer).expect("a slice can be read");
            }
            sizes.overfull()
        };
        let found = |rollouts, size| Some(Overfull { group_id: "b".to_owned(), rollouts, size });
        assert_eq!((find(Some(1)), find(Some(2)), find(Some(3)), find(None)), (found(3, 1), found(3, 2), None, None));
    }
}
