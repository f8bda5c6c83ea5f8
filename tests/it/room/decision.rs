//! The decision about room without a store: a policy in memory, as simple as possible.

use std::collections::BTreeMap;

use forebay_domain::{
    admission::{
        Backlog,
        room::{Asked, AskedGroup, BegunGroup, NextBatch, PATIENCE_PART, Share, Standing},
    },
    rules::Rules,
};
use forebay_wire::{EnvironmentRules, PolicyRules};

use super::workers::{Ask, Fate, IDLE_S, Played, Scene, Service, TICK_S, TIMEOUT_S};

struct Group {
    environment: &'static str,
    arrived: u32,
    posts: u32,
    opened_s: u64,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Ready,
    Leased,
    Gone,
}

struct Admission {
    group: Option<String>,
    environment: String,
    unused: u32,
    granted_s: u64,
    is_session: bool,
}

/// A policy in memory.
pub(super) struct Memory {
    rules: Rules,
    minimum: u64,
    groups: BTreeMap<String, Group>,
    /// Names of ready groups, in order.
    line: Vec<String>,
    admissions: BTreeMap<String, Admission>,
    now_s: u64,
    minted: u32,
}

impl Memory {
    pub(super) fn new(scene: &Scene) -> Self {
        let mut rules = PolicyRules::default();
        (rules.group.size, rules.group.timeout_s) = (scene.size, TIMEOUT_S);
        (rules.batch.groups, rules.staleness.max) = (scene.groups, Some(scene.staleness));
        if scene.minimum > 0 {
            let min_share = f64::from(scene.minimum) / f64::from(scene.groups);
            rules.batch.environments.insert("slow".to_owned(), EnvironmentRules { weight: 1.0, min_share });
        }
        Self {
            rules: Rules::parse(rules).expect("these rules can work"),
            minimum: scene.minimum.into(),
            groups: BTreeMap::new(),
            line: Vec::new(),
            admissions: BTreeMap::new(),
            now_s: 0,
            minted: 0,
        }
    }

    fn is_decided(&self, group: &str) -> bool {
        self.groups.get(group).is_some_and(|group| group.state != State::Open)
    }

    fn reserved_of(&self, group: &str) -> u64 {
        let of_group = self.admissions.values().filter(|one| one.group.as_deref() == Some(group));
        of_group.map(|one| u64::from(one.unused)).sum()
    }

    fn ready_of(&self, environment: &str) -> u64 {
        self.line.iter().filter(|name| self.groups[*name].environment == environment).count() as u64
    }

    fn standing(&self) -> Standing {
        let live = self.groups.values().filter(|group| group.state != State::Gone);
        let mut begun: BTreeMap<String, BegunGroup> = BTreeMap::new();
        for (name, group) in self.groups.iter().filter(|(_, group)| group.state == State::Open) {
            let missing = u64::from(self.rules.group.size - group.arrived);
            let environment = group.environment.to_owned();
            begun.insert(name.clone(), BegunGroup { environment, missing, reserved: 0 });
        }
        let mut standing = Standing {
            backlog: Backlog {
                rollouts: live.map(|group| u64::from(group.arrived)).sum(),
                bytes: 0,
                reserved: self.admissions.values().map(|one| u64::from(one.unused)).sum(),
            },
            next: NextBatch {
                ready_groups: self.line.len() as u64,
                is_in_training: self.groups.values().any(|group| group.state == State::Leased),
                shares: Vec::new(),
            },
            ..Standing::default()
        };
        for one in self.admissions.values().filter(|one| one.unused > 0) {
            if one.group.as_ref().is_some_and(|group| self.is_decided(group)) {
                continue;
            }
            let is_recent = one.granted_s + TIMEOUT_S / PATIENCE_PART > self.now_s;
            let label = match &one.group {
                None => {
                    *standing.unnamed.entry(one.environment.clone()).or_default() += u64::from(one.unused);
                    standing.unnamed_lately += u64::from(one.unused) * u64::from(is_recent);
                    one.environment.clone()
                }
                Some(group) => {
                    let missing = self.rules.group.size.into();
                    let new = BegunGroup { environment: one.environment.clone(), missing, reserved: 0 };
                    let group = begun.entry(group.clone()).or_insert(new);
                    group.reserved += u64::from(one.unused);
                    group.environment.clone()
                }
            };
            if one.is_session || is_recent {
                standing.at_work.insert(label);
            }
        }
        standing.begun = begun.into_values().collect();
        if self.minimum > 0 {
            let ready = self.ready_of("slow");
            standing.next.shares.push(Share { environment: "slow".to_owned(), needed: self.minimum, ready });
        }
        standing
    }

    fn reserve(&mut self, ask: Ask, is_session: bool) -> Option<(u32, String)> {
        if ask.group.as_ref().is_some_and(|group| self.is_decided(group)) {
            return None;
        }
        let now_s = self.now_s;
        let lasts_s = |one: &Admission| if one.is_session { IDLE_S } else { TIMEOUT_S };
        self.admissions.retain(|_, one| one.granted_s + lasts_s(one) > now_s);
        let group = ask.group.as_ref().map(|name| {
            let reserved = self.reserved_of(name);
            let found = self.groups.get(name);
            AskedGroup {
                size: self.rules.group.size,
                missing: self.rules.group.size - found.map_or(0, |group| group.arrived),
                reserved,
                has_begun: found.is_some() || reserved > 0,
            }
        });
        let asked = Asked { rollouts: ask.rollouts, group, environment: ask.environment.as_deref() };
        let granted = self.standing().decide(&self.rules, &asked).unwrap_or(0);
        self.minted += 1;
        let room = self.minted.to_string();
        if granted > 0 {
            let environment = ask.environment.unwrap_or_default();
            let one = Admission { group: ask.group, environment, unused: granted, granted_s: now_s, is_session };
            self.admissions.insert(room.clone(), one);
        }
        Some((granted, room))
    }

    fn take(&mut self, played: &Played) -> Fate {
        if let Some(admission) = self.admissions.get_mut(&played.room) {
            admission.unused = admission.unused.saturating_sub(1);
        }
        let size = self.rules.group.size;
        let opened_s = self.now_s;
        let new = Group { environment: played.environment, arrived: 0, posts: 0, opened_s, state: State::Open };
        let group = self.groups.entry(played.group.clone()).or_insert(new);
        if group.state != State::Open {
            return Fate::Decided;
        }
        group.posts += 1;
        group.arrived += u32::from(!played.failed);
        if group.arrived == size {
            group.state = State::Ready;
            self.line.push(played.group.clone());
        } else if group.posts == 4 * size {
            group.state = State::Gone;
        }
        if group.state == State::Open { Fate::Open } else { Fate::Decided }
    }
}

impl Service for Memory {
    async fn ask(&mut self, ask: Ask) -> Option<(u32, String)> {
        self.reserve(ask, false)
    }

    async fn open(&mut self, _: &str, group: &str, environment: Option<&str>) -> Option<String> {
        if self.is_decided(group) {
            return None;
        }
        let environment = environment.map(str::to_owned);
        let (granted, room) = self.reserve(Ask { rollouts: 1, group: Some(group.to_owned()), environment }, true)?;
        (granted > 0).then_some(room)
    }

    async fn post(&mut self, played: Played) -> Fate {
        self.take(&played)
    }

    async fn end(&mut self, played: Played) -> Fate {
        self.take(&played)
    }

    async fn lease(&mut self) -> bool {
        let most = self.rules.batch.groups as usize;
        if self.line.len() < most || self.ready_of("slow") < self.minimum {
            return false;
        }
        // The minimum first, and then the order of the line.
        let slow = self.line.iter().filter(|name| self.groups[*name].environment == "slow").cloned();
        let mut taken: Vec<String> = slow.take(self.minimum as usize).collect();
        let rest: Vec<String> = self.line.iter().filter(|name| !taken.contains(name)).cloned().collect();
        taken.extend(rest.into_iter().take(most - taken.len()));
        self.line.retain(|name| !taken.contains(name));
        for name in taken {
            self.groups.get_mut(&name).expect("it is in the line").state = State::Leased;
        }
        true
    }

    async fn ack(&mut self, _: i64) {
        for group in self.groups.values_mut().filter(|group| group.state == State::Leased) {
            group.state = State::Gone;
        }
    }

    async fn pass(&mut self) {
        self.now_s += TICK_S;
        for group in self.groups.values_mut() {
            if group.state == State::Open && group.opened_s + TIMEOUT_S <= self.now_s {
                group.state = State::Gone;
            }
        }
    }
}
