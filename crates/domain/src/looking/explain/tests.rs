//! Each state and each cause: when it appears, when it disappears, and how causes are ranked.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{
    Explanation, PolicyCondition as State, explain,
    facts::{
        Asking, EnvironmentFacts, Event, Facts, Gauges, GroupFacts, Lease, Limits, ScoringFacts, StepFacts,
        VersionFacts, Window, Windows, WorkFacts,
    },
};
use crate::{
    admission::refused::{RefusedRoom, RoomFor},
    clock::Timestamp,
    ids::SessionId,
    staleness::{UnderWay, WaitedFor},
};

const NOW: i64 = 1_800_000_000;

fn ago(seconds: i64) -> Timestamp {
    Timestamp::from_micros((NOW - seconds) * 1_000_000)
}

fn window(seconds: i64, groups: i64) -> Window {
    Window { seconds, received: groups * 8, tokens: 1e6, ready: groups, acked: groups / 16, ..Window::default() }
}

/// A policy whose trainer is fed: a step each minute, and a batch in training.
fn fed() -> Facts {
    let step = |index: i64| StepFacts {
        step: 100 - index,
        acked_us: ago(10 + 60 * index).as_micros(),
        groups: 16,
        flat_groups: 0,
        reward: Some(0.5),
        stale_mean: 1.0,
        stale_max: 2,
        waited_us: 1_000_000,
        held_us: 50_000_000,
    };
    Facts {
        now: ago(0),
        policy: "math".to_owned(),
        is_writable: true,
        unconserved: 0,
        restored: false,
        windows: Windows { quarter: window(900, 240), hour: window(3_600, 960), day: window(86_400, 20_000) },
        gauges: Gauges {
            ready_groups: 10,
            needed_groups: 16,
            live_rollouts: 80,
            live_bytes: 1 << 20,
            ..Gauges::default()
        },
        limits: Limits {
            max_rollouts: 4_096,
            max_bytes: 1 << 33,
            staleness_max: Some(4),
            group_size: 8,
            group_timeout_s: 3_600,
            max_deliveries: 3,
            group_filters: vec!["zero-variance".to_owned()],
            rollout_filters: vec!["too-long".to_owned()],
            bounds_tokens: false,
            settles_by_checkpoint: true,
        },
        last_post: Some(ago(1)),
        last_ask: Some(ago(10)),
        last_ack: Some(ago(10)),
        created: ago(1_000_000),
        oldest_ready: Some(ago(30)),
        asking: Vec::new(),
        leases: vec![lease(10, 0)],
        returned: Vec::new(),
        steps: (0..40).map(step).collect(),
        lacking: vec![1, 2, 3, 4, 5, 6, 7],
        scoring: None,
        groups: Vec::new(),
        version: VersionFacts { current: 100, step: Some(100), acked_step: Some(100), checkpoint_step: Some(99) },
        events: Vec::new(),
        environments: Vec::new(),
        refused: Vec::new(),
        waited_for: None,
    }
}

fn lease(age_s: i64, failed: i64) -> Lease {
    Lease {
        batch_id: "0195f1a0-aaaa-7bbb-8ccc-0123456789ab".to_owned(),
        consumer: "trainer-0".to_owned(),
        since: ago(age_s),
        failed,
    }
}

fn scoring(groups: i64) -> ScoringFacts {
    ScoringFacts { groups, oldest: ago(720), names: ["judge".to_owned(), "tests".to_owned()].into(), work: Vec::new() }
}

#[test]
fn groups_that_wait_for_scores_come_first() {
    let mut facts = starved(600);
    facts.scoring = Some(scoring(7));
    let headline = "The trainer waits for 10 min: 10 of 16 groups are ready. 7 groups have all of their rollouts and wait for \
                    the scores judge, tests, the oldest rollout for 12 min";
    check(&facts, State::Starved, Some("scores-missing"), headline);
    facts.scoring = Some(ScoringFacts { names: ["judge".to_owned()].into(), ..scoring(0) });
    facts.gauges.scoring_rollouts = 1;
    let found = explain(&facts);
    let text = found.causes.iter().find(|cause| cause.code == "scores-missing").map(|cause| cause.text.as_str());
    assert_eq!(text, Some("1 rollout waits for the score judge, the oldest for 12 min"));
}

#[test]
fn a_slow_rollout_that_is_waited_for_is_named() {
    let session = UnderWay::Session { session_id: SessionId::mint(), rollout_id: "task7-3".to_owned() };
    let waited = |rollouts| WaitedFor { first: session.clone(), began: ago(2_040), rollouts, until: ago(-720) };
    let mut facts = starved(600);
    (facts.gauges.ready_groups, facts.waited_for) = (16, Some(waited(4)));
    let headline = "The trainer waits for 10 min: 16 of 16 groups are ready. The batch waits for rollout task7-3, which was \
                    opened 34 min ago and 3 more: the version that follows from this batch would make it too old; the wait \
                    ends in 12 min at the latest (`staleness.wait_s`)";
    check(&facts, State::Starved, Some("slow-rollout"), headline);
    // Without enough groups, something else is the reason.
    facts.gauges.ready_groups = 15;
    assert!(!codes(&explain(&facts)).contains(&"slow-rollout"));
    // While the trainer has not waited for long, nothing is wrong, but the batch is not ready.
    let mut facts = fed();
    (facts.gauges.ready_groups, facts.waited_for) = (16, Some(waited(1)));
    check(
        &facts,
        State::Fed,
        None,
        "A batch is in training for 10 s (median 50 s); the next batch waits for rollout task7-3",
    );
}

#[test]
fn work_for_scores_is_told_by_what_it_waits_for() {
    let told = |open, leased, exhausted, asked: Option<i64>| {
        let mut facts = starved(600);
        let failure = Some("timeout".to_owned());
        let asked = asked.map(ago);
        let work = WorkFacts { name: "judge".to_owned(), open, leased, exhausted, failure, asked };
        facts.scoring = Some(ScoringFacts { names: ["judge".to_owned()].into(), work: vec![work], ..scoring(1) });
        let found = explain(&facts).causes.into_iter().find(|cause| cause.code == "scores-missing");
        let text = found.expect("groups wait").text;
        text.split_once("12 min").map(|(_, work)| work.to_owned()).expect("the age")
    };
    assert_eq!(told(3, 0, 0, None), "; nobody has ever asked for work for judge");
    assert_eq!(told(3, 0, 0, Some(300)), "; nobody has asked for work for judge for 5 min");
    assert_eq!(told(3, 0, 0, Some(59)), "");
    assert_eq!(told(3, 1, 0, Some(300)), "; 1 item of the work for judge is with scorers");
    let exhausted = told(3, 1, 1_001, None);
    let expected = "; more than 1,000 items of the work for judge have no attempts left, the last time with: timeout \
                    (`POST /scores/retry` gives them back)";
    assert_eq!(exhausted, expected);
}

/// The same policy with a trainer that waits.
fn starved(seconds: i64) -> Facts {
    let mut facts = fed();
    facts.leases.clear();
    facts.asking = vec![Asking { consumer: "trainer-0".to_owned(), since: ago(seconds) }];
    facts
}

fn discards(window: &mut Window, rule: &str, groups: i64) {
    window.ready -= groups;
    window.discarded.insert(rule.to_owned(), groups);
    window.discarded_rollouts += groups as f64 * 8.0;
}

/// A change of what is known.
type Change = fn(&mut Facts);

fn drops(facts: &mut Facts, rule: &str) {
    facts.windows.quarter.dropped.insert(rule.to_owned(), 960);
}

fn event(kind: &str, age_s: i64) -> Event {
    Event { at: ago(age_s), kind: kind.to_owned(), key_id: Some("k-ops".to_owned()), filter: Some("judge".to_owned()) }
}

fn codes(explanation: &Explanation) -> Vec<&'static str> {
    explanation.causes.iter().map(|cause| cause.code).collect()
}

#[track_caller]
fn check(facts: &Facts, state: State, first: Option<&str>, headline: &str) {
    let found = explain(facts);
    assert_eq!((found.state, codes(&found).first().copied()), (state, first), "{found:#?}");
    assert_eq!(found.headline, headline, "{found:#?}");
}

#[test]
fn a_policy_without_trouble_is_fed_and_has_no_causes() {
    check(&fed(), State::Fed, None, "A batch is in training for 10 s (median 50 s); 10 of 16 groups are ready");
    let found = explain(&fed());
    assert!(found.ruled_out.is_empty() && found.unknown.is_empty(), "{found:#?}");
}

#[test]
fn a_policy_that_nothing_happens_to_is_idle() {
    let mut facts = fed();
    facts.leases.clear();
    (facts.last_post, facts.last_ask, facts.last_ack) = (Some(ago(7_200)), Some(ago(7_300)), Some(ago(7_300)));
    facts.windows = Windows::default();
    check(&facts, State::Idle, None, "No post and no trainer for 2 h");
    (facts.last_post, facts.last_ask) = (None, None);
    facts.steps.clear();
    check(&facts, State::Idle, None, "Nothing has been posted yet");
}

#[test]
fn a_store_that_cannot_write_comes_before_everything() {
    let mut facts = starved(600);
    facts.is_writable = false;
    check(
        &facts,
        State::Broken,
        Some("store-unwritable"),
        "The store cannot write: every post and every ack is refused until it can",
    );
    facts.is_writable = true;
    facts.unconserved = 3;
    check(&facts, State::Broken, Some("tallies-differ"), "The tallies do not add up: 3 rollouts are unaccounted for");
}

#[test]
fn a_filter_that_discards_starves_the_trainer() {
    let mut facts = starved(250);
    facts.gauges.ready_groups = 3;
    discards(&mut facts.windows.quarter, "zero-variance", 232);
    let day = &mut facts.windows.day;
    discards(day, "zero-variance", 3_600);
    let headline = "The trainer waits for 4 min 10 s: 3 of 16 groups are ready. zero-variance discards 97% of groups";
    check(&facts, State::Starved, Some("filter-discards"), headline);
    let found = explain(&facts);
    let cause = &found.causes[0];
    assert_eq!(cause.filter.as_deref(), Some("zero-variance"));
    assert_eq!(
        cause.text,
        "zero-variance discards 97% of decided groups (232 of 240 in 15 min); in the last 24 h it was 18%. At this rate the \
         batch takes 24 min 23 s, without it 49 s"
    );
    // Whether these tasks are too easy or too hard is what to know next.
    let group = |rule: Option<&str>, low: f64, high: f64| GroupFacts {
        discarded_by: rule.map(str::to_owned),
        rewards: Some((low, high)),
        ..GroupFacts::default()
    };
    let rule = Some("zero-variance");
    facts.groups = vec![group(rule, 1.0, 1.0), group(rule, 1.0, 1.0), group(rule, 0.0, 0.0), group(None, 0.0, 1.0)];
    let told = &explain(&facts).causes[0];
    let equal =
        "Of its newest 3 groups, 2 have only the best reward, 1 (solved), and 1 only the worst, 0 (never solved)";
    assert!(told.text.contains(equal), "{told:#?}");
    let counts = ["equal_best", "equal_worst", "equal_of"].map(|name| told.numbers[name] as i64);
    assert_eq!(counts, [2, 1, 3]);
    facts.groups = vec![group(rule, 1.0, 1.0)];
    assert!(!explain(&facts).causes[0].text.contains("newest"), "one reward says nothing about the task");
    assert!((1_462.0..1_463.5).contains(&cause.numbers["eta_s"]), "{cause:#?}");
    assert_eq!(cause.see.as_deref(), Some("./groups?policy=math&state=discarded&reason=zero%2Dvariance&order=newest"));
    // What is not the reason is said.
    let excluded: Vec<_> = found.ruled_out.iter().map(|finding| finding.code).collect();
    assert!(excluded.contains(&"backlog-full") && excluded.contains(&"leases-expire"), "{excluded:?}");
    // A wait that is shorter than a step is none.
    facts.asking[0].since = ago(40);
    assert_eq!(explain(&facts).state, State::Dropping);
}

#[test]
fn a_filter_that_discards_everything_is_said_to_never_fill_the_batch() {
    let mut facts = starved(250);
    facts.gauges.ready_groups = 0;
    discards(&mut facts.windows.quarter, "zero-variance", 240);
    let found = explain(&facts);
    assert!(found.causes[0].text.contains("At this rate the batch is never full, without it 1 min"), "{found:#?}");
    assert!(!found.causes[0].numbers.contains_key("eta_s"));
}

#[test]
fn agents_that_stopped_come_before_what_filters_discard() {
    let mut facts = starved(600);
    facts.last_post = Some(ago(900));
    discards(&mut facts.windows.hour, "zero-variance", 100);
    facts.windows.quarter = Window { seconds: 900, ..Window::default() };
    let headline = "The trainer waits for 10 min: 10 of 16 groups are ready. No post for 15 min";
    check(&facts, State::Starved, Some("no-posts"), headline);
    facts.last_post = None;
    let headline = "The trainer waits for 10 min: 10 of 16 groups are ready. Nothing was ever posted";
    check(&facts, State::Starved, Some("no-posts"), headline);
}

#[test]
fn a_starved_trainer_has_its_other_causes() {
    let with = |change: fn(&mut Facts)| {
        let mut facts = starved(600);
        change(&mut facts);
        codes(&explain(&facts)).into_iter().collect::<BTreeSet<_>>()
    };
    let usual = with(|_| {});
    assert_eq!(usual, BTreeSet::from(["waiting-for-few"]));
    let cases: [(&str, Change); 10] = [
        ("scores-missing", |facts| facts.scoring = Some(scoring(0))),
        ("backlog-full", |facts| facts.gauges.live_rollouts = 4_096),
        ("groups-time-out", |facts| discards(&mut facts.windows.quarter, "incomplete", 60)),
        ("no-reward", |facts| drops(facts, "no-reward")),
        ("filter-drops", |facts| drops(facts, "too-long")),
        ("late-arrivals", |facts| facts.windows.quarter.late = 500),
        ("groups-go-stale", |facts| facts.windows.hour.stale = 100),
        ("returned-goes-first", |facts| facts.gauges.returned_batches = 1),
        ("superseded-caller", |facts| facts.restored = true),
        ("rules-changed", |facts| facts.events.push(event("rules-changed", 300))),
    ];
    for (code, change) in cases {
        assert!(with(change).contains(code), "{code}");
    }
    let slow = with(|facts| {
        let group = GroupFacts {
            is_batched: true,
            filled_us: Some(600_000_000),
            tokens_mean: Some(1_000.0),
            ..GroupFacts::default()
        };
        facts.groups = vec![group; 5];
    });
    assert!(slow.contains("groups-fill-slowly"), "{slow:?}");
    let fails = with(|facts| facts.events.push(event("filter-fails", 300)));
    assert!(fails.contains("filter-fails"), "{fails:?}");
}

#[test]
fn an_environment_without_groups_is_the_cause_if_there_are_enough_in_all() {
    let mut facts = starved(600);
    facts.gauges.ready_groups = 20;
    facts.environments = vec![EnvironmentFacts { environment: "web".to_owned(), ready: 1, needed: 4 }];
    let found = explain(&facts);
    assert_eq!(codes(&found).first(), Some(&"environment-lacks"));
    assert_eq!(found.causes[0].text, "The batch waits for environment web: 1 of the 4 groups that it needs is ready");
    // Nobody could take a batch, so it is not called untaken either.
    facts.asking.clear();
    facts.oldest_ready = Some(ago(7_200));
    facts.last_ask = Some(ago(7_200));
    assert_ne!(explain(&facts).state, State::Untaken);
}

#[test]
fn a_batch_that_lacks_a_minimum_is_never_called_ready() {
    let mut facts = fed();
    facts.gauges.ready_groups = 20;
    facts.environments = vec![EnvironmentFacts { environment: "web".to_owned(), ready: 1, needed: 4 }];
    let lacking = "1 of 4 groups of environment web is ready";
    check(&facts, State::Fed, None, &format!("A batch is in training for 10 s (median 50 s); {lacking}"));
    facts.leases.clear();
    check(&facts, State::Starved, Some("environment-lacks"), lacking);
    facts.asking = vec![Asking { consumer: "trainer-0".to_owned(), since: ago(5) }];
    check(&facts, State::Starved, Some("environment-lacks"), &format!("The trainer waits for 5 s: {lacking}"));
    facts.environments[0].ready = 4;
    assert_eq!(explain(&facts).state, State::Fed);
}

#[test]
fn agents_that_are_refused_room_are_named_with_the_rule() {
    let mut facts = starved(600);
    let refused = |by, environment, rule| RefusedRoom::new(by, environment, rule, ago(300));
    facts.refused = vec![
        refused(RoomFor::Admission, Some("web"), "minimum-share"),
        refused(RoomFor::Session, None, "whole-group"),
        refused(RoomFor::Session, Some("web"), "a rule of a newer version"),
    ];
    let found = explain(&facts);
    let texts: Vec<_> =
        found.causes.iter().filter(|cause| cause.code == "no-room").map(|cause| cause.text.as_str()).collect();
    let expected = [
        "Admissions of environment web have been refused for 5 min: the room that is left is kept for an environment whose \
         minimum the next batch lacks",
        "New sessions have been refused for 5 min: a new group begins only if all of its places fit",
        "New sessions of environment web have been refused for 5 min: a rule of a newer version",
    ];
    assert_eq!(texts, expected);
    facts.refused.clear();
    assert!(!codes(&explain(&facts)).contains(&"no-room"));
}

#[test]
fn agents_that_wait_for_room_while_nobody_trains_are_held_back() {
    let mut facts = fed();
    let refused = |rule, seconds| vec![RefusedRoom::new(RoomFor::Admission, None, rule, ago(seconds))];
    facts.refused = refused("staleness", 300);
    assert_eq!(explain(&facts).state, State::Fed, "a batch is in training, so there will be room");
    facts.leases.clear();
    let headline = "Agents have waited for room for 5 min, and no trainer asks for a batch";
    check(&facts, State::HeldBack, Some("no-room"), headline);
    facts.refused = refused("staleness", 30);
    assert_eq!(explain(&facts).state, State::Fed, "a trainer may be between two batches");
    // No trainer makes room in a quota.
    let mut facts = fed();
    facts.refused = refused("quota", 300);
    let headline = "Agents have waited for 5 min: as many sessions are open as a quota allows";
    check(&facts, State::HeldBack, Some("no-room"), headline);
}

#[test]
fn a_trainer_that_is_gone_leaves_batches_untaken() {
    let mut facts = fed();
    facts.leases.clear();
    facts.gauges.ready_groups = 40;
    facts.oldest_ready = Some(ago(3_000));
    facts.last_ask = Some(ago(2_520));
    check(&facts, State::Untaken, Some("nobody-asks"), "No trainer has asked for 42 min: 40 groups are ready");
    facts.last_ask = None;
    check(&facts, State::Untaken, Some("nobody-asks"), "No trainer has ever asked: 40 groups are ready for 50 min");
    // A lease means that its holder is busy, and a wait that it is there.
    facts.leases.push(lease(200, 0));
    assert_eq!(explain(&facts).state, State::Fed);
    facts.leases.clear();
    facts.asking = vec![Asking { consumer: String::new(), since: ago(5) }];
    assert_eq!(explain(&facts).state, State::Fed);
}

#[test]
fn a_trainer_that_fails_is_stuck() {
    let mut facts = fed();
    facts.leases = vec![lease(30, 2)];
    let headline = "Batch 0195…89ab was delivered 2 times without an ack, last to trainer-0";
    check(&facts, State::Stuck, Some("deliveries-fail"), headline);
    facts.leases = vec![lease(3_000, 0)];
    let headline = "Batch 0195…89ab is held by trainer-0 for 50 min (median 50 s)";
    check(&facts, State::Stuck, Some("lease-overdue"), headline);
    // The median of the policy's own steps decides what is unusual.
    facts.steps.iter_mut().for_each(|step| step.held_us = 900_000_000);
    assert_eq!(explain(&facts).state, State::Fed);
    facts.gauges.quarantined_batches = 1;
    check(&facts, State::Stuck, Some("quarantined"), "1 batch is quarantined and waits for you");
    facts.gauges.quarantined_batches = 0;
    facts.windows.hour.expired = 2;
    check(&facts, State::Stuck, Some("leases-expire"), "2 leases expired in 1 h");
}

#[test]
fn a_full_backlog_holds_agents_back_until_it_has_room() {
    let mut facts = fed();
    facts.gauges.live_rollouts = 4_096;
    check(
        &facts,
        State::HeldBack,
        Some("backlog-full"),
        "Agents are refused: 4,096 of 4,096 rollouts wait to be trained",
    );
    // A little below the bound, agents are refused only if they were before.
    facts.gauges.live_rollouts = 4_000;
    assert_eq!(explain(&facts).state, State::Fed);
    facts.events = vec![event("backlog-full", 60)];
    assert_eq!(explain(&facts).state, State::HeldBack);
    facts.events.insert(0, event("backlog-freed", 30));
    assert_eq!(explain(&facts).state, State::Fed);
    // If the process that refused has ended, nobody has said that it is over.
    facts.events.remove(0);
    facts.gauges.live_rollouts = 1_000;
    assert_eq!(explain(&facts).state, State::Fed);
}

#[test]
fn a_full_backlog_that_waits_for_an_environment_says_what_is_accepted() {
    let mut facts = fed();
    facts.leases.clear();
    facts.gauges.live_rollouts = 4_096;
    facts.gauges.ready_groups = 20;
    facts.environments = vec![EnvironmentFacts { environment: "web".to_owned(), ready: 1, needed: 4 }];
    let found = explain(&facts);
    let full = found.causes.iter().find(|cause| cause.code == "backlog-full").expect("it is full");
    assert_eq!(found.state, State::Starved);
    assert!(full.text.ends_with("429, except groups of environment web, which the batch waits for"), "{}", full.text);
}

#[test]
fn groups_that_go_stale_are_a_state_with_hints() {
    let mut facts = fed();
    facts.windows.hour.stale = 192;
    facts.version.step = Some(96);
    facts.windows.hour.assumed = 4_000;
    let group = |is_stale, tokens| GroupFacts {
        is_stale,
        is_batched: !is_stale,
        tokens_mean: Some(tokens),
        ..GroupFacts::default()
    };
    facts.groups = vec![group(true, 9_000.0), group(true, 9_000.0), group(true, 9_000.0)];
    facts.groups.extend([group(false, 1_000.0), group(false, 1_000.0), group(false, 1_000.0)]);
    check(&facts, State::Stale, Some("version-lags"), "20% of groups went stale in 1 h: 192 of 960 (bound 4)");
    let found: BTreeSet<_> = codes(&explain(&facts)).into_iter().collect();
    assert_eq!(found, BTreeSet::from(["groups-go-stale", "length-bias", "version-lags", "versions-assumed"]));
    // Few groups say nothing.
    facts.windows.hour = Window { stale: 2, ..window(3_600, 7) };
    assert_eq!(explain(&facts).state, State::Fed);
    facts.steps.iter_mut().for_each(|step| step.stale_mean = 3.2);
    let found = explain(&facts);
    assert_eq!(found.headline, "What is trained is 3.2 versions old on average: the bound is 4");
    facts.limits.staleness_max = None;
    assert_eq!(explain(&facts).state, State::Fed);
}

#[test]
fn groups_with_equal_rewards_train_nothing() {
    let mut facts = fed();
    facts.steps.iter_mut().for_each(|step| step.flat_groups = 12);
    facts.limits.group_filters.clear();
    let headline = "75% of trained groups have equal rewards: 240 of 320 in the last 20 steps, which train nothing";
    check(&facts, State::Flat, Some("flat-groups"), headline);
    assert!(codes(&explain(&facts)).contains(&"no-group-filter"));
    facts.limits.group_size = 1;
    assert_eq!(explain(&facts).state, State::Fed, "single rollouts have no spread");
}

#[test]
fn what_is_lost_is_a_state_of_its_own_if_the_trainer_is_fed() {
    let mut facts = fed();
    facts.windows.quarter.dropped.insert("too-long".to_owned(), 1_200);
    check(&facts, State::Dropping, Some("filter-drops"), "too-long drops 62% of rollouts (1,200 of 1,920 in 15 min)");
    // Twice as much as before is a change, too, and less is none.
    facts.windows.quarter.dropped.insert("too-long".to_owned(), 500);
    assert_eq!(explain(&facts).state, State::Dropping);
    facts.windows.day.dropped.insert("too-long".to_owned(), 30_000);
    assert_eq!(explain(&facts).state, State::Fed);
}

#[test]
fn causes_are_ranked_by_the_time_that_they_cost() {
    let mut facts = starved(600);
    discards(&mut facts.windows.quarter, "zero-variance", 60);
    discards(&mut facts.windows.quarter, "judge", 120);
    let found = explain(&facts);
    let filters: Vec<_> = found.causes.iter().filter(|cause| cause.code == "filter-discards").collect();
    assert!(filters[0].text.starts_with("judge") && filters[1].text.starts_with("zero-variance"), "{filters:#?}");
    assert!(found.causes.is_sorted_by(|first, second| first.weight >= second.weight), "{found:#?}");
}

fn any_window() -> impl Strategy<Value = Window> {
    (prop::array::uniform8(0_i64..2_000), 0_i64..100_000, prop::collection::btree_map("[a-c]", 1_i64..1_000, 0..3))
        .prop_map(|([received, ready, stale, late, expired, acked, masked, assumed], seconds, rules)| Window {
            seconds,
            received,
            tokens: received as f64 * 100.0,
            masked,
            late,
            assumed,
            dropped: rules.clone(),
            discarded: rules,
            discarded_rollouts: 3.0,
            ready,
            stale,
            stale_rollouts: 1.0,
            expired,
            nacked: expired,
            acked,
            waited_s: acked as f64,
        })
}

fn any_facts() -> impl Strategy<Value = Facts> {
    let gauges = prop::array::uniform10(0_i64..5_000);
    let ages = prop::array::uniform8(prop::option::of(-10_i64..200_000));
    let steps = prop::collection::vec((0_i64..5, 0_i64..5, -5_000_000_i64..5_000_000_000, -2.0..1e9), 0..30);
    let flags = prop::array::uniform4(any::<bool>());
    (any_window(), any_window(), any_window(), gauges, ages, steps, flags).prop_map(
        |(quarter, hour, day, gauges, ages, steps, [is_writable, restored, is_bounded, is_asking])| {
            let mut facts = fed();
            facts.windows = Windows { quarter, hour, day };
            let [ready, needed, open, returned, quarantined, trained, live, bytes, bound, lacks] = gauges;
            facts.gauges = Gauges {
                ready_groups: ready,
                needed_groups: needed,
                open_groups: open,
                returned_batches: returned % 3,
                quarantined_batches: quarantined / 4_900,
                quarantined_groups: 0,
                trained_batches: trained,
                live_rollouts: live,
                live_bytes: bytes,
                reserved: 0,
                open_sessions: 0,
                scoring_rollouts: open,
            };
            facts.scoring = (open > 0).then(|| scoring(open));
            facts.limits.max_rollouts = bound;
            facts.limits.staleness_max = is_bounded.then_some(bound % 8);
            (facts.is_writable, facts.restored) = (is_writable, restored);
            facts.lacking = vec![0, u32::try_from(lacks).unwrap_or(0)];
            let at = |age: Option<i64>| age.map(ago);
            (facts.last_post, facts.last_ask, facts.last_ack) = (at(ages[0]), at(ages[1]), at(ages[2]));
            facts.oldest_ready = at(ages[3]);
            facts.leases = ages[4].map(|age| lease(age, age % 3)).into_iter().collect();
            facts.returned = ages[5].map(|age| lease(age, age % 3)).into_iter().collect();
            facts.asking = match ages[6].filter(|_| is_asking) {
                Some(age) => vec![Asking { consumer: "other".to_owned(), since: ago(age) }],
                None => Vec::new(),
            };
            facts.events = ages[7].map(|age| event("rules-changed", age)).into_iter().collect();
            facts.steps = steps
                .iter()
                .map(|(groups, flat_groups, held_us, stale_mean)| StepFacts {
                    groups: *groups,
                    flat_groups: *flat_groups,
                    acked_us: ago(*groups).as_micros(),
                    held_us: *held_us,
                    stale_mean: *stale_mean,
                    ..StepFacts::default()
                })
                .collect();
            facts
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_explanation_is_made_of_finite_numbers_and_whole_sentences(facts in any_facts()) {
        let found = explain(&facts);
        let findings = found.ruled_out.iter().chain(&found.unknown);
        let told = found.causes.iter().map(|cause| (&cause.text, &cause.numbers));
        for (text, numbers) in told.chain(findings.map(|finding| (&finding.text, &finding.numbers))) {
            prop_assert!(numbers.values().all(|value| value.is_finite()), "{numbers:?}");
            prop_assert!(!text.contains("NaN") && !text.contains("inf") && !text.contains('–') && !text.is_empty(), "{text}");
        }
        prop_assert!(found.causes.iter().all(|cause| (0.0..=1.0).contains(&cause.weight)));
        prop_assert!(found.causes.is_sorted_by(|first, second| first.weight >= second.weight));
        prop_assert!(!found.headline.is_empty() && !found.headline.contains("NaN"), "{}", found.headline);
        // An alarm has a cause, and what is a cause is not ruled out.
        prop_assert_eq!(found.causes.is_empty() , matches!(found.state, State::Fed | State::Idle), "{:#?}", found);
        for finding in &found.ruled_out {
            prop_assert!(found.causes.iter().all(|cause| cause.code != finding.code), "{:#?}", found);
        }
        // The numbers of a sentence about parts are those of its facts.
        for cause in &found.causes {
            if let Some(share) = cause.numbers.get("share") {
                prop_assert!((0.0..=1.0).contains(share), "{:#?}", cause);
            }
        }
        let busy = !facts.leases.is_empty() || !facts.asking.is_empty();
        prop_assert!(!busy || found.state != State::Untaken, "a busy trainer is never gone");
    }
}

#[test]
fn states_have_different_names_and_signs() {
    let names: BTreeMap<_, _> = State::ALL.iter().map(|state| (state.as_str(), state.glyph())).collect();
    let glyphs: BTreeSet<_> = names.values().collect();
    assert_eq!((names.len(), glyphs.len()), (State::ALL.len(), State::ALL.len()));
}
