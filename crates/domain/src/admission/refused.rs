//! Requests for room that were refused lately, kept with the policy so that every replica can say why agents wait.

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;

/// The most entries of a policy.
const ENTRIES_MAX: usize = 8;

/// A caller that is refused asks again within seconds. After this time without a request, a refusal is over.
const OVER_AFTER_S: u64 = 60;

/// Entries are written at most once in this time, because callers that wait ask again and again.
const WRITE_EVERY_US: i64 = 10_000_000;

/// Who asks for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoomFor {
    /// A call of `POST /admissions`.
    Admission,
    /// A call of `POST /sessions`.
    Session,
}

/// Callers that are refused room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedRoom {
    /// What they call.
    pub by: RoomFor,
    /// The environment that they name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// The rule that refused the last of them.
    pub rule: String,
    /// Since when they are refused without a grant in between, in microseconds.
    since_us: i64,
    /// When the last of them was refused, or somewhat before.
    last_us: i64,
}

impl RefusedRoom {
    /// A refusal now.
    #[must_use]
    pub fn new(by: RoomFor, environment: Option<&str>, rule: &str, now: Timestamp) -> Self {
        let now = now.as_micros();
        Self { by, environment: environment.map(str::to_owned), rule: rule.to_owned(), since_us: now, last_us: now }
    }

    /// Since when callers are refused.
    #[must_use]
    pub fn since(&self) -> Timestamp {
        Timestamp::from_micros(self.since_us)
    }

    /// Whether callers still ask.
    #[must_use]
    pub fn is_current(&self, now: Timestamp) -> bool {
        Timestamp::from_micros(self.last_us).plus_seconds(OVER_AFTER_S) >= now
    }

    fn is_of(&self, by: RoomFor, environment: Option<&str>) -> bool {
        self.by == by && self.environment.as_deref() == environment
    }
}

/// The entries after a refusal; none if they need not be written.
#[must_use]
pub fn noted(entries: &[RefusedRoom], new: RefusedRoom, now: Timestamp) -> Option<Vec<RefusedRoom>> {
    let mut kept: Vec<RefusedRoom> = entries.iter().filter(|entry| entry.is_current(now)).cloned().collect();
    if let Some(entry) = kept.iter_mut().find(|entry| entry.is_of(new.by, new.environment.as_deref())) {
        if entry.rule == new.rule && new.last_us - entry.last_us < WRITE_EVERY_US {
            return None;
        }
        *entry = RefusedRoom { since_us: entry.since_us, ..new };
    } else if kept.len() < ENTRIES_MAX {
        kept.push(new);
    } else {
        return None;
    }
    Some(kept)
}

/// The entries after a grant; none if they need not be written.
#[must_use]
pub fn without(entries: &[RefusedRoom], by: RoomFor, environment: Option<&str>) -> Option<Vec<RefusedRoom>> {
    let is_other = |entry: &&RefusedRoom| !entry.is_of(by, environment);
    (!entries.iter().all(|entry| is_other(&entry))).then(|| entries.iter().filter(is_other).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_lasts_from_the_first_request_to_a_grant() {
        let at = |seconds: u64| Timestamp::from_micros(0).plus_seconds(seconds);
        let refused = |rule: &str, seconds| RefusedRoom::new(RoomFor::Admission, None, rule, at(seconds));
        let first = noted(&[], refused("staleness", 100), at(100)).expect("the first is written");
        assert_eq!(noted(&first, refused("staleness", 105), at(105)), None, "it was written just before");
        let later = noted(&first, refused("whole-group", 130), at(130)).expect("the rule is another");
        assert_eq!((later.len(), later[0].since(), later[0].rule.as_str()), (1, at(100), "whole-group"));
        assert_eq!(without(&later, RoomFor::Session, None), None);
        assert_eq!(without(&later, RoomFor::Admission, Some("swe")), None);
        assert_eq!(without(&later, RoomFor::Admission, None), Some(Vec::new()));
        // Nobody asked for more than a minute.
        assert!(later[0].is_current(at(190)) && !later[0].is_current(at(191)));
        let again = noted(&later, refused("staleness", 200), at(200)).expect("it begins anew");
        assert_eq!((again.len(), again[0].since()), (1, at(200)));
    }

    #[test]
    fn the_entries_of_a_policy_are_bounded() {
        let now = Timestamp::from_micros(0);
        let mut entries = Vec::new();
        for label in 0..20 {
            let new = RefusedRoom::new(RoomFor::Session, Some(&label.to_string()), "staleness", now);
            entries = noted(&entries, new, now).unwrap_or(entries);
        }
        assert_eq!(entries.len(), ENTRIES_MAX);
    }
}
