//! A set of calls as a tree of their ids, which all steps of the assembly read.

use super::{
    call::{Call, Place},
    parents::{self, Link},
    paths::{Paths, Position},
};

/// A set of calls, and how their ids continue each other.
#[derive(Debug)]
pub struct CallSet<'a> {
    pub(super) calls: Vec<Call<'a>>,
    pub(super) paths: Paths<'a>,
    pub(super) places: Vec<Place>,
    /// The parents of the calls that have one.
    pub(super) links: Vec<Option<Link>>,
    /// Whether some call has a reward or a state of its own.
    pub(super) has_turns: bool,
}

/// Calls that follow each other in a circle, or follow a call that does not exist, by their index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} calls follow each other in a circle or follow a call that does not exist", .0.len())]
pub struct NoBeginning(pub Vec<usize>);

impl<'a> CallSet<'a> {
    /// Finds out how calls continue each other. This reads every id that is given once.
    pub fn new(calls: Vec<Call<'a>>) -> Result<Self, NoBeginning> {
        let mut paths = Paths::default();
        let places = places(&calls, &mut paths)?;
        let links = parents::find(&calls, &places, &paths);
        let has_turns = calls.iter().any(|call| call.reward.is_some() || call.state_key.is_some());
        Ok(Self { calls, paths, places, links, has_turns })
    }

    /// The indexes of the calls in the order of their ends.
    pub(super) fn by_end(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.calls.len()).collect();
        order.sort_unstable_by_key(|&call| self.calls[call].ended);
        order
    }

    /// The number of ids of a call's prompt, with those of the calls that it follows.
    pub(super) fn prompt_len(&self, call: usize) -> usize {
        self.paths.depth(self.places[call].prompt)
    }
}

/// Adds the ids of all calls to the tree, each call after the one that it follows.
fn places<'a>(calls: &[Call<'a>], paths: &mut Paths<'a>) -> Result<Vec<Place>, NoBeginning> {
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); calls.len()];
    let mut next = Vec::new();
    for (call, sent) in calls.iter().enumerate() {
        match sent.after {
            None => next.push(call),
            Some(after) => {
                if let Some(followers) = followers.get_mut(after.call) {
                    followers.push(call);
                }
            }
        }
    }
    let mut places: Vec<Option<Place>> = vec![None; calls.len()];
    while let Some(call) = next.pop() {
        let Call { after, prompt, ids, .. } = calls[call];
        let from = match after.and_then(|after| Some((places[after.call]?, after.trimmed))) {
            None => Position::BEGINNING,
            Some((place, true)) => place.trimmed,
            Some((place, false)) => place.full,
        };
        let (before_last, last) = ids.split_at(ids.len().saturating_sub(1));
        let prompt = paths.extend(from, prompt);
        let trimmed = paths.extend(prompt, before_last);
        places[call] = Some(Place { prompt, trimmed, full: paths.extend(trimmed, last) });
        next.append(&mut followers[call]);
    }
    let missing: Vec<usize> = (0..calls.len()).filter(|&call| places[call].is_none()).collect();
    if missing.is_empty() { Ok(places.into_iter().flatten().collect()) } else { Err(NoBeginning(missing)) }
}
