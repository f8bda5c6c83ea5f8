//! Which call continues which one.
//!
//! The parent of a call is the call whose prompt and ids are the longest prefix of its prompt. If a call ended on a stop
//! token, the next prompt may have another id in the place of this token: the call then matches with one id less, and
//! at least one id of it must be left. Among calls that match equally, one that is not abandoned comes first, then one that
//! was delivered, then one of the same agent, then the one that ended first.

use std::collections::HashMap;

use super::{
    call::{Call, Place},
    paths::{Paths, Position},
};

/// The parent of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) call: usize,
    /// Whether the last id of the parent is left out.
    pub(super) trimmed: bool,
}

/// The parents of all calls.
pub(super) fn find<'a>(calls: &[Call<'a>], places: &[Place], paths: &Paths<'_>) -> Vec<Option<Link>> {
    let candidates = Candidates::of(calls, places);
    let order = paths.downwards();
    // The last position above each position where a call matches.
    let mut nearest: Vec<Option<Position>> = vec![None; order.len()];
    for &at in &order {
        if let Some(above) = paths.above(at) {
            let is_match = candidates.best(above, Wanted::Any, |found| found.any).is_some();
            nearest[at.index()] = if is_match { Some(above) } else { nearest[above.index()] };
        }
    }
    let parent = |(call, place): (&Call<'a>, &Place)| {
        let wanted = Wanted::Of(call.agent);
        let above = nearest[place.prompt.index()];
        // Where the prompt ends, no id stands in the place of a stop token.
        let here = candidates.best(place.prompt, wanted, |found| found.whole);
        here.or_else(|| candidates.best(above?, wanted, |found| found.any))
    };
    calls.iter().zip(places).map(parent).collect()
}

/// Whose calls are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wanted<'a> {
    Of(Option<&'a str>),
    Any,
}

/// The calls that match a prompt, by the position at which they match, by their standing, and by agent.
struct Candidates<'a>(HashMap<(Position, Standing, Wanted<'a>), Earliest>);

/// What makes a call a more likely parent than another one, the more likely first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Standing {
    is_abandoned: bool,
    is_delivered: bool,
}

/// The calls that match at one position and ended first.
#[derive(Default)]
struct Earliest {
    /// The first one that matches with all of its ids.
    whole: Option<Link>,
    /// The first one that matches with all of its ids or with one id less. Where the id that is left out follows, the
    /// call matches with all of its ids at a later position, so this position is not asked for.
    any: Option<Link>,
}

impl<'a> Candidates<'a> {
    fn of(calls: &[Call<'a>], places: &[Place]) -> Self {
        let mut order: Vec<usize> = (0..calls.len()).filter(|&call| !calls[call].ids.is_empty()).collect();
        order.sort_unstable_by_key(|&call| calls[call].ended);
        let mut candidates = Self(HashMap::new());
        for call in order {
            candidates.add(&calls[call], places[call].full, Link { call, trimmed: false });
            if calls[call].stopped_on_token && calls[call].ids.len() > 1 {
                candidates.add(&calls[call], places[call].trimmed, Link { call, trimmed: true });
            }
        }
        candidates
    }

    fn add(&mut self, call: &Call<'a>, at: Position, link: Link) {
        for wanted in [Wanted::Of(call.agent), Wanted::Any] {
            let standing = Standing { is_abandoned: call.abandoned, is_delivered: call.delivered };
            let earliest = self.0.entry((at, standing, wanted)).or_default();
            earliest.any.get_or_insert(link);
            if !link.trimmed {
                earliest.whole.get_or_insert(link);
            }
        }
    }

    /// The best call that matches at a position.
    fn best(&self, at: Position, wanted: Wanted<'a>, which: impl Fn(&Earliest) -> Option<Link>) -> Option<Link> {
        let standings = [(false, true), (false, false), (true, true), (true, false)];
        let standings =
            standings.into_iter().map(|(is_abandoned, is_delivered)| Standing { is_abandoned, is_delivered });
        let mut order = standings.flat_map(|standing| [(standing, wanted), (standing, Wanted::Any)]);
        order.find_map(|(standing, wanted)| self.0.get(&(at, standing, wanted)).and_then(&which))
    }
}
