//! Generations: an `instance_id` comes back in later epochs, and then its items form another group.
//!
//! The group of the first generation has the id of the instance, and later ones have a suffix: `task`, `task@2`, `task@3`.
//! An instance whose own id ends like that has a suffix from the beginning, so no two groups have the same id.
//!
//! All items of an instance belong to one execution. The newest rollout of the execution tells the current generation, so
//! nothing is kept in memory. Two writers may still decide at once that a new generation begins; both then write to the
//! same group.

use forebay_domain::ids::{ExecutionId, GroupId, PolicyName};
use forebay_service::Buffer;
use forebay_store::error::StoreError;

use crate::slime::item::Item;

/// The generation of an instance that an item is written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Generation {
    instance_id: String,
    number: u64,
}

impl Generation {
    pub(super) fn first(instance_id: &str) -> Self {
        Self { instance_id: instance_id.to_owned(), number: 1 }
    }

    pub(super) fn next(self) -> Self {
        Self { number: self.number + 1, ..self }
    }

    pub(super) fn group_id(&self) -> GroupId {
        let Self { instance_id, number } = self;
        let id = if *number == 1 && suffix(instance_id).is_none() {
            instance_id.clone()
        } else {
            format!("{instance_id}@{number}")
        };
        GroupId::parse(&id).expect("an instance id leaves room for a suffix")
    }

    /// The generation of an instance that has this group; none if the group is not of the instance.
    fn of_group(instance_id: &str, group_id: &str) -> Option<Self> {
        let number = if group_id == instance_id { 1 } else { suffix(group_id)? };
        Some(Self { instance_id: instance_id.to_owned(), number }).filter(|found| found.group_id().as_str() == group_id)
    }

    /// The generation to which items of an instance belong now.
    pub(super) async fn current(buffer: &Buffer, policy: &PolicyName, instance_id: &str) -> Result<Self, StoreError> {
        let latest = buffer.latest_group(policy.clone(), execution(instance_id)).await?;
        let found = latest.and_then(|latest| Some((Self::of_group(instance_id, &latest.group_id)?, latest.state)));
        Ok(match found {
            Some((generation, state)) if state.is_open() => generation,
            Some((decided, _)) => decided.next(),
            None => Self::first(instance_id),
        })
    }
}

/// The execution of all items of an instance.
fn execution(instance_id: &str) -> ExecutionId {
    ExecutionId::parse(&format!("slime/{instance_id}")).expect("an instance id leaves room for a prefix")
}

/// Names the group and the execution of an item. The group is that of the first generation also in later ones, so that a
/// repeated item has the same content.
pub(super) fn assign(item: &mut Item) {
    item.trajectory.group_id = Some(Generation::first(&item.instance_id).group_id().as_str().to_owned());
    item.trajectory.execution_id = Some(format!("slime/{}", item.instance_id));
}

/// The instance of a group, which all of its generations have in common.
pub(super) fn instance_of(group_id: &str) -> &str {
    match (suffix(group_id), group_id.rsplit_once('@')) {
        (Some(_), Some((instance_id, _))) => instance_id,
        _ => group_id,
    }
}

/// The number after the last `@`, if the text ends with one.
fn suffix(text: &str) -> Option<u64> {
    let (_, digits) = text.rsplit_once('@')?;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    // A number that is too large is a suffix as well.
    is_number.then(|| digits.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn groups_of_all_generations_have_different_ids_and_are_found_by_them() {
        let instances = ["a", "a@", "a@2", "a@2@3", "a@02", "@1", "5", "a@99999999999999999999999"];
        let mut ids = BTreeSet::new();
        for instance in instances {
            let mut generation = Generation::first(instance);
            for _ in 0..4 {
                let id = generation.group_id();
                assert!(ids.insert(id.as_str().to_owned()), "{id} is the id of two groups");
                assert_eq!(Generation::of_group(instance, id.as_str()), Some(generation.clone()));
                assert_eq!(instance_of(id.as_str()), instance);
                generation = generation.next();
            }
        }
        assert_eq!(Generation::first("a").next().group_id().as_str(), "a@2");
        assert_eq!(Generation::of_group("a", "b@2"), None);
    }
}
