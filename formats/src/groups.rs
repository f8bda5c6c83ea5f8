//! Groups of a source that have more rollouts than places. The service would store the others as late, without their
//! tokens and texts, so an import looks for such groups before it stores anything.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    hash::{BuildHasher as _, RandomState},
    io::{self, BufRead},
};

use crate::importer::Importer;

/// The group with the most rollouts, if that is more than its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overfull {
    /// The id of the group.
    pub group_id: String,
    /// How many rollouts the source has of it.
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

/// Reads a source to its end, and finds the group that exceeds its size most. Groups whose size only the rules of their
/// policy say are not looked at. Numbers are held for each group and each rollout, and nothing else.
pub fn overfull<R: BufRead>(mut importer: Importer<R>) -> io::Result<Option<Overfull>> {
    // A collision of two hashes of 64 bits would count a rollout too much or too little, once in billions of sources.
    let hashes = RandomState::new();
    let (mut rollouts, mut known) = (HashMap::<u64, u64>::new(), HashSet::new());
    let mut most: Option<Overfull> = None;
    while let Some(record) = importer.next_record()? {
        for trajectory in record.outcome.iter().flat_map(|imported| &imported.trajectories) {
            let (Some(group_id), Some(size)) = (&trajectory.group_id, trajectory.group_size) else { continue };
            let group = (&trajectory.policy, group_id);
            if !known.insert(hashes.hash_one((group, &trajectory.rollout_id))) {
                continue;
            }
            let count = rollouts.entry(hashes.hash_one(group)).or_default();
            *count += 1;
            if *count > u64::from(size) && most.as_ref().is_none_or(|most| *count > most.rollouts) {
                most = Some(Overfull { group_id: group_id.clone(), rollouts: *count, size });
            }
        }
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    #[test]
    fn the_fullest_group_is_found_and_repeats_do_not_count() {
        let line = |group: &str, rollout: &str| {
            format!(r#"{{"group_id":"{group}","rollout_id":"{rollout}","reward":1,"messages":[]}}"#)
        };
        let lines = [("a", "1"), ("b", "2"), ("b", "3"), ("b", "3"), ("c", "1"), ("b", "4"), ("a", "5")];
        let source = lines.map(|(group, rollout)| line(group, rollout)).join("\n");
        let find = |group_size| {
            let options = Options { group_size, ..Options::default() };
            overfull(Importer::new(&crate::chat::FORMAT, &options, source.as_bytes())).expect("a slice can be read")
        };
        let found = |rollouts, size| Some(Overfull { group_id: "b".to_owned(), rollouts, size });
        assert_eq!((find(Some(1)), find(Some(2)), find(Some(3)), find(None)), (found(3, 1), found(3, 2), None, None));
    }
}
