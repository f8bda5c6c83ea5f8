//! How often each operation is generated. The weights determine how far a history gets before a reset or a timeout ends
//! it.

use std::collections::BTreeMap;

use forebay_wire::{BatchOrder, BatchState, GroupState, LossWeighting, Retries, SessionState, Status};
use proptest::{
    collection::{btree_map, vec},
    option,
    prelude::{BoxedStrategy, Just, Strategy, any},
    prop_oneof,
    sample::select,
};

use super::{
    BatchPick, BodyPlan, CONSUMERS, EXECUTIONS, EpochPick, GROUPS, GroupPick, HolderPick, Item, LeasePick, NackPick,
    Operation, POLICIES, REQUESTS, ROLLOUTS, Sequence, SessionOperation, StepPick, URIS, VersionPick, VersionsPlan,
    sessions::{CallPlan, FinishPlan, KeyPlan, ModelPick, OpeningPlan, PromptPlan, SessionGroup, SessionPick},
};
use crate::model::view::{Label, PolicyNumber, Rules};

/// Histories of a given length.
pub(crate) fn sequences() -> impl Strategy<Value = Sequence> {
    let rules = (rules(), rules()).prop_map(|(saving, acking)| vec![saving, Rules { settled_by_ack: true, ..acking }]);
    let operations = prop_oneof![160 => operation().prop_map(|operation| vec![operation]), 2 => giving_up(), 2 => outlived_call(), 8 => episode(), 1 => judging()];
    (rules, vec(operations, 40..200))
        .prop_map(|(rules, operations)| Sequence { rules, operations: operations.into_iter().flatten().collect() })
}

/// A sequence that is rare by chance: a batch is trained, its payloads are purged, its lineage is given up, and the
/// trainer restarts from a forced step.
fn giving_up() -> impl Strategy<Value = Vec<Operation>> {
    let holder =
        HolderPick { batch: BatchPick::In(BatchState::Leased, 0), lease: LeasePick::Last, epoch: EpochPick::Absent };
    let (policy, epoch) = (0, EpochPick::Absent);
    let claim = Operation::Claim { policy, consumer: 0, request: None, partial: true, epoch };
    let resume = move |step, force| Operation::Resume { policy, step: Some(step), force, epoch };
    (vec(body(), 3..4), holder_step()).prop_map(move |(items, step)| {
        vec![
            Operation::Fill { policy, items },
            claim.clone(),
            Operation::Ack { holder, step },
            Operation::Advance { seconds: 1_000 },
            Operation::Sweep,
            resume(StepPick::BeforeLastAcked, true),
            resume(StepPick::Checkpoint, false),
            Operation::Checkpoint { policy, step, force: true, epoch },
        ]
    })
}

/// A session expires while one of its calls is in flight, which is rare by chance, too.
fn outlived_call() -> impl Strategy<Value = Vec<Operation>> {
    let opening = opening().prop_map(|plan| OpeningPlan { rollout: None, ttl_s: 30, ..plan });
    (opening, call_plan()).prop_map(|(opening, plan)| {
        let session = SessionPick { state: None, nth: 0 };
        vec![
            Operation::Session(SessionOperation::Open(opening)),
            Operation::Session(SessionOperation::BeginCall { session, key: KeyPlan::Own(0) }),
            Operation::Advance { seconds: 60 },
            Operation::Sweep,
            Operation::Session(SessionOperation::EndCall { nth: 0, plan: Some(plan) }),
        ]
    })
}

/// Scorers at a policy whose rollouts wait for scores, which few policies have by chance.
fn judging() -> impl Strategy<Value = Vec<Operation>> {
    (policy(), rules(), vec(body(), 2..5)).prop_flat_map(|(policy, rules, items)| {
        let rules = Rules { scored_s: Some(300), filters: false, ..rules };
        let lease = |request| Operation::LeaseWork { policy, names: vec![0, 1], max: 3, request };
        let repeatable = lease(Some(0));
        let fail = Operation::ScoreWork { nth: 0, value: None, unknown: false };
        let retry = |name| Operation::RetryWork { policy, name };
        let exhausting = vec![lease(None), fail.clone(), lease(None), fail, retry(0), retry(1)];
        let step = prop_oneof![
            6 => of_scorer(Just(policy).boxed()).prop_map(|operation| vec![operation]),
            // A scorer that is not heard of any more.
            1 => Just(vec![Operation::Advance { seconds: 31 }, Operation::Sweep]),
            // What it sends may come twice.
            2 => of_work().prop_map(|operation| vec![operation.clone(), operation]),
            1 => Just(vec![repeatable.clone(), repeatable]),
            1 => Just(exhausting),
        ];
        let begin = [Operation::PutPolicy { policy, rules }, Operation::Fill { policy, items }, lease(None)];
        vec(step, 3..8).prop_map(move |steps| begin.iter().cloned().chain(steps.into_iter().flatten()).collect())
    })
}

/// A call of a scorer.
fn of_scorer(policy: BoxedStrategy<PolicyNumber>) -> impl Strategy<Value = Operation> {
    let names = select(vec![vec![0], vec![1], vec![0, 1]]);
    let lease = (policy.clone(), names, 1..4_usize, option::weighted(0.3, 0..REQUESTS));
    let extend = (policy.clone(), vec(0..4_usize, 1..3));
    prop_oneof![
        6 => lease.prop_map(|(policy, names, max, request)| Operation::LeaseWork { policy, names, max, request }),
        8 => of_work(),
        1 => extend.prop_map(|(policy, leases)| Operation::ExtendWork { policy, leases }),
        2 => (policy, 0..2_usize).prop_map(|(policy, name)| Operation::RetryWork { policy, name }),
    ]
}

/// What the holder of a lease sends, or somebody who has none.
fn of_work() -> impl Strategy<Value = Operation> {
    (0..4_usize, option::weighted(0.7, 0..3_u8), proptest::bool::weighted(0.1))
        .prop_map(|(nth, value, unknown)| Operation::ScoreWork { nth, value, unknown })
}

/// One or two whole sessions: they are opened, have calls, and are finished together.
fn episode() -> impl Strategy<Value = Vec<Operation>> {
    let opening = opening().prop_map(|plan| OpeningPlan { rollout: None, ..plan });
    let finish = finish_plan().prop_map(|plan| FinishPlan { status: None, ..plan });
    vec((opening, vec(call_plan(), 1..5), finish), 1..3).prop_map(|episodes| {
        let newest = |nth| SessionPick { state: None, nth };
        let (mut operations, mut finishes) = (Vec::new(), Vec::new());
        for (place, (opening, calls, finish)) in episodes.into_iter().rev().enumerate() {
            let call = |plan| SessionOperation::AgentCall { session: newest(0), key: KeyPlan::Own(0), plan };
            operations.push(SessionOperation::Open(opening));
            operations.extend(calls.into_iter().map(call));
            finishes.push((newest(place), finish));
        }
        operations.push(SessionOperation::Finish(finishes));
        operations.into_iter().map(Operation::Session).collect()
    })
}

fn session_operation() -> impl Strategy<Value = SessionOperation> {
    prop_oneof![
        10 => opening().prop_map(SessionOperation::Open),
        4 => (prop_oneof![session(), ended_session()], any::<bool>())
            .prop_map(|(session, changed)| SessionOperation::Reopen { session, changed }),
        4 => (prop_oneof![4 => session(), 1 => ended_session()], option::of(select(vec![false, false, false, true])))
            .prop_map(|(session, wrong)| SessionOperation::Resume { session, wrong }),
        20 => (session(), session_key(), call_plan())
            .prop_map(|(session, key, plan)| SessionOperation::AgentCall { session, key, plan }),
        5 => (session(), session_key()).prop_map(|(session, key)| SessionOperation::BeginCall { session, key }),
        5 => (0..3_usize, option::weighted(0.8, prop_oneof![4 => call_plan(), 1 => repeated_call()]))
            .prop_map(|(nth, plan)| SessionOperation::EndCall { nth, plan }),
        10 => vec((session(), finish_plan()), 1..3).prop_map(SessionOperation::Finish),
        2 => ended_session().prop_map(SessionOperation::EndAgain),
        3 => (prop_oneof![session(), ended_session()], 0..2_usize, any::<bool>())
            .prop_map(|(session, reason, keep)| SessionOperation::Abort { session, reason, keep }),
        5 => session().prop_map(SessionOperation::Turns),
        3 => (session(), any::<bool>()).prop_map(|(session, sized)| SessionOperation::Post { session, sized }),
    ]
}

fn session() -> impl Strategy<Value = SessionPick> {
    use SessionState::{Aborted, Expired, Finished, Open, Parked};
    let open = (0..3_usize).prop_map(|nth| SessionPick { state: Some(Open), nth });
    let ended = (select(vec![None, Some(Finished), Some(Aborted), Some(Expired)]), 0..6_usize)
        .prop_map(|(state, nth)| SessionPick { state, nth });
    let parked = (0..3_usize).prop_map(|nth| SessionPick { state: Some(Parked), nth });
    prop_oneof![7 => open, 1 => parked, 1 => ended]
}

fn ended_session() -> impl Strategy<Value = SessionPick> {
    use SessionState::{Aborted, Expired, Finished};
    (select(vec![Finished, Finished, Aborted, Expired]), 0..3_usize)
        .prop_map(|(state, nth)| SessionPick { state: Some(state), nth })
}

fn opening() -> impl Strategy<Value = OpeningPlan> {
    let group = prop_oneof![
        2 => Just(SessionGroup::Alone),
        6 => Just(SessionGroup::Open),
        2 => (0..GROUPS).prop_map(SessionGroup::Any),
    ];
    let policies = select(vec![vec![0], vec![0], vec![1], vec![0, 1]]);
    let rollout = option::weighted(0.15, 0..ROLLOUTS);
    let group_size = option::weighted(0.15, 1..4_u32);
    let execution = option::weighted(0.3, 0..EXECUTIONS);
    let times = (select(vec![5, 60, 1_000]), select(vec![30, 300, 5_000]), select(vec![2, 8, 64]));
    (policies, rollout, group, group_size, execution, times).prop_map(
        |(policies, rollout, group, group_size, execution, times)| {
            let (idle_s, ttl_s, max_calls) = times;
            OpeningPlan { policies, rollout, group, group_size, execution, idle_s, ttl_s, max_calls }
        },
    )
}

fn session_key() -> impl Strategy<Value = KeyPlan> {
    prop_oneof![
        30 => (0..3_usize).prop_map(KeyPlan::Own),
        1 => (0..4_usize).prop_map(KeyPlan::Other),
        1 => Just(KeyPlan::Forged),
    ]
}

fn call_plan() -> impl Strategy<Value = CallPlan> {
    let policy = prop_oneof![
        20 => (0..POLICIES).prop_map(ModelPick::Policy),
        1 => Just(ModelPick::Foreign),
        1 => Just(ModelPick::Frozen),
    ];
    let tail = || vec(1..4_i32, 0..3);
    let prompt = prop_oneof![
        2 => (any::<bool>(), vec(1..4_i32, 1..4)).prop_map(|(long, ids)| PromptPlan::New { long, ids }),
        8 => (select(vec![0, 0, 0, 1, 2]), select(vec![0, 0, 0, 1, 1, 2]), tail())
            .prop_map(|(nth, without, tail)| PromptPlan::Extend { nth, without, tail }),
        2 => (0..3_usize).prop_map(|nth| PromptPlan::Same { nth }),
        2 => (0..3_usize, 0..6_usize, 1..6_i32).prop_map(|(nth, place, id)| PromptPlan::Drift { nth, place, id }),
    ];
    let ids = prop_oneof![1 => Just(Vec::new()), 9 => vec(1..4_i32, 1..4)];
    let agent = select(vec![None, Some(0), Some(0), Some(1)]);
    let sent = (0..4_u8, select(vec![0, 0, 0, 1, 2]), prop_oneof![4 => Just(true), 1 => Just(false)]);
    (policy, agent, prompt, ids, (-1..3_i64, 0..3_i64), any::<bool>(), sent).prop_map(
        |(policy, agent, prompt, ids, versions, stopped, (body, retries, delivered))| CallPlan {
            policy,
            agent,
            prompt,
            ids,
            versions,
            stopped,
            body,
            retries,
            delivered,
        },
    )
}

/// A call that its client repeats.
fn repeated_call() -> impl Strategy<Value = CallPlan> {
    call_plan().prop_map(|plan| CallPlan { prompt: PromptPlan::Same { nth: 0 }, retries: 2, ..plan })
}

fn finish_plan() -> impl Strategy<Value = FinishPlan> {
    let status = prop_oneof![
        6 => Just(None),
        1 => select(vec![Status::Completed, Status::Truncated, Status::Aborted, Status::Failed]).prop_map(Some),
    ];
    let rewards = prop_oneof![6 => Just(BTreeMap::new()), 1 => btree_map(0..POLICIES, 0..3_u8, 1..2)];
    (option::weighted(0.9, 0..3_u8), rewards, status).prop_map(|(reward, rewards, status)| FinishPlan {
        reward,
        rewards,
        status,
    })
}

fn holder_step() -> impl Strategy<Value = StepPick> {
    select(vec![StepPick::Next, StepPick::Skipping])
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        10 => vec(item(), 1..4).prop_map(Operation::Post),
        20 => (policy(), vec(body(), 1..4)).prop_map(|(policy, items)| Operation::Fill { policy, items }),
        4 => (policy(), 0..ROLLOUTS, any::<bool>())
            .prop_map(|(policy, nth, changed)| Operation::Repost { policy, nth, changed }),
        3 => (policy(), 0..ROLLOUTS, 0..2_usize, 0..3_u8, any::<bool>()).prop_map(
            |(policy, rollout, name, value, replace)| Operation::Score { policy, rollout, name, value, replace }
        ),
        12 => (policy(), 0..3_usize, select(vec![vec![0], vec![1], vec![0, 1], vec![0, 1]]), 0..3_u8, any::<bool>())
            .prop_map(|(policy, nth, names, value, replace)| {
                Operation::ScoreWaiting { policy, nth, names, value, replace }
            }),
        3 => of_scorer(policy().boxed()),
        2 => (policy(), group()).prop_map(|(policy, group)| Operation::Close { policy, group }),
        2 => (policy(), group()).prop_map(|(policy, group)| Operation::Discard { policy, group }),
        16 => (policy(), 0..CONSUMERS, option::of(0..REQUESTS), any::<bool>(), epoch()).prop_map(
            |(policy, consumer, request, partial, epoch)| Operation::Claim { policy, consumer, request, partial, epoch }
        ),
        3 => (holder(), select(vec![5, 30, 300])).prop_map(|(holder, ttl_s)| Operation::Extend { holder, ttl_s }),
        14 => (holder(), step()).prop_map(|(holder, step)| Operation::Ack { holder, step }),
        5 => (holder(), nacked()).prop_map(|(holder, groups)| Operation::Nack { holder, groups }),
        2 => batch().prop_map(|batch| Operation::Readmit { batch }),
        4 => (policy(), version(), option::of(step()), option::of(0..URIS), epoch()).prop_map(
            |(policy, version, step, uri, epoch)| Operation::Publish { policy, version, step, uri, epoch }
        ),
        3 => (policy(), step(), any::<bool>(), epoch())
            .prop_map(|(policy, step, force, epoch)| Operation::Checkpoint { policy, step, force, epoch }),
        6 => (policy(), option::weighted(0.8, step()), any::<bool>(), epoch())
            .prop_map(|(policy, step, force, epoch)| Operation::Resume { policy, step, force, epoch }),
        1 => (policy(), epoch()).prop_map(|(policy, epoch)| Operation::Reset { policy, epoch }),
        2 => (policy(), rules()).prop_map(|(policy, rules)| Operation::PutPolicy { policy, rules }),
        8 => select(vec![1, 1, 5, 5, 10, 10, 30, 60, 100, 1_000]).prop_map(|seconds| Operation::Advance { seconds }),
        2 => select(vec![-7, -2, 3, 5]).prop_map(|hours| Operation::Step { hours }),
        5 => Just(Operation::Sweep),
        1 => Just(Operation::Restart),
        40 => session_operation().prop_map(Operation::Session),
    ]
}

fn policy() -> impl Strategy<Value = PolicyNumber> {
    prop_oneof![3 => Just(0), 1 => Just(1)]
}

fn rules() -> impl Strategy<Value = Rules> {
    let group = (select(vec![1, 1, 2, 2, 3]), 1..3_u32, select(vec![30, 100]), any::<bool>(), any::<bool>());
    let sessions = (select(vec![Retries::Transport, Retries::Last, Retries::Keep]), select(vec![1, 1, 2, 3]));
    let group = (group, sessions);
    let order = select(vec![BatchOrder::Fifo, BatchOrder::Freshest]);
    let batch = (select(vec![1, 2, 2, 3]), select(vec![None, None, Some(7), Some(12)]), order, environments());
    let lease = (select(vec![10, 60]), select(vec![1, 2, 2, 5]), select(vec![0, 1, 2, 2, 20]));
    // A batch has at most nine rollouts, and a tenth of nine rounds down to zero, so a full backlog reopens as soon as
    // it is below nine.
    let backlog = select(vec![None, None, Some(9)]);
    let wait_s = option::weighted(0.4, select(vec![20, 500]));
    let staleness = (select(vec![None, Some(0), Some(0), Some(1), Some(3)]), backlog, wait_s);
    let weighting = select(vec![
        LossWeighting::RolloutMean,
        LossWeighting::TurnMean,
        LossWeighting::SampleMean,
        LossWeighting::TokenMean,
        LossWeighting::PromptMean,
        LossWeighting::Constant,
    ]);
    let retention =
        (select(vec![0, 50, 500]), select(vec![0, 20, 500]), select(vec![0, 30]), select(vec![0, 40, 2_000, 2_000]));
    let group = (group, option::weighted(0.2, select(vec![5, 60, 300])));
    (group, batch, lease, staleness, weighting, retention).prop_map(
        |(((group, (retries, max_attempts)), scored_s), batch, lease, staleness, weighting, retention)| Rules {
            size: group.0,
            min_size: group.1.min(group.0),
            timeout_s: group.2,
            shrink: group.3,
            filters: group.4,
            scored_s,
            batch_groups: batch.0,
            max_tokens: batch.1,
            // The oldest groups come first where rollouts are waited for.
            order: if staleness.2.is_some() { BatchOrder::Fifo } else { batch.2 },
            environments: batch.3,
            ttl_s: lease.0,
            max_deliveries: lease.1,
            max_resumes: lease.2,
            staleness: staleness.0,
            wait_s: staleness.2,
            backlog: staleness.1,
            settled_by_ack: false,
            retries,
            max_attempts,
            weighting,
            trained_s: retention.0,
            settled_s: retention.1,
            dropped_s: retention.2,
            tombstone_s: retention.3,
        },
    )
}

/// None in most rules, so that batches in the order of the line stay as frequent.
fn environments() -> impl Strategy<Value = BTreeMap<Label, (i64, i64)>> {
    let of = || (1..4_i64, select(vec![0, 0, 25, 50]));
    let environments = option::of((of(), option::of(of())));
    option::weighted(0.4, environments).prop_map(|found| {
        let Some((x, y)) = found.flatten() else { return BTreeMap::new() };
        [(1, Some(x)), (2, y)].into_iter().filter_map(|(label, of)| Some((label, of?))).collect()
    })
}

fn item() -> impl Strategy<Value = Item> {
    let group = prop_oneof![5 => (0..GROUPS).prop_map(Some), 1 => Just(None)];
    let group_size = prop_oneof![5 => Just(None), 1 => (1..4_u32).prop_map(Some)];
    (policy(), 0..ROLLOUTS, group, group_size, body()).prop_map(|(policy, rollout, group, group_size, body)| Item {
        policy,
        rollout,
        group_size: group_size.filter(|_| group.is_some()),
        group,
        body,
    })
}

fn body() -> impl Strategy<Value = BodyPlan> {
    let status = prop_oneof![
        6 => Just(Status::Completed),
        2 => Just(Status::Truncated),
        2 => Just(Status::Aborted),
        1 => Just(Status::Failed),
    ];
    let reward = prop_oneof![8 => (0..3_u8).prop_map(Some), 1 => Just(None)];
    let segment = || (select(vec![1, 1, 1, 5]), select(vec![[1, 1], [1, 1], [0, 1], [0, 0]]));
    let versions = prop_oneof![
        3 => Just(VersionsPlan::Absent),
        3 => (-1..4_i64).prop_map(VersionsPlan::Behind),
        1 => (0..4_i64, 0..4_i64).prop_map(|(first, second)| VersionsPlan::Spans(first, second)),
    ];
    let execution = option::weighted(0.3, 0..EXECUTIONS);
    (status, reward, vec(segment(), 1..3), versions, execution).prop_map(
        |(status, reward, segments, versions, execution)| BodyPlan { status, reward, segments, versions, execution },
    )
}

fn group() -> impl Strategy<Value = GroupPick> {
    use GroupState::{Batched, Open, Quarantined, Ready};
    (select(vec![None, Some(Open), Some(Ready), Some(Quarantined), Some(Batched)]), 0..GROUPS)
        .prop_map(|(state, nth)| GroupPick { state, nth })
}

fn batch() -> impl Strategy<Value = BatchPick> {
    use BatchState::{Checkpointed, Leased, Quarantined, Returned, Split, Trained};
    let states = vec![Leased, Returned, Trained, Checkpointed, Quarantined, Split];
    prop_oneof![
        12 => (Just(Leased), 0..3_usize).prop_map(|(state, nth)| BatchPick::In(state, nth)),
        8 => (select(states), 0..3_usize).prop_map(|(state, nth)| BatchPick::In(state, nth)),
        3 => (0..20_usize).prop_map(BatchPick::Any),
        1 => Just(BatchPick::Unknown),
    ]
}

fn holder() -> impl Strategy<Value = HolderPick> {
    let lease = prop_oneof![10 => Just(LeasePick::Last), 3 => Just(LeasePick::Earlier), 1 => Just(LeasePick::Forged)];
    (batch(), lease, epoch()).prop_map(|(batch, lease, epoch)| HolderPick { batch, lease, epoch })
}

fn epoch() -> impl Strategy<Value = EpochPick> {
    prop_oneof![8 => Just(EpochPick::Absent), 2 => Just(EpochPick::Current), 1 => Just(EpochPick::Before)]
}

fn step() -> impl Strategy<Value = StepPick> {
    prop_oneof![
        6 => Just(StepPick::Next),
        1 => Just(StepPick::Skipping),
        2 => Just(StepPick::LastAcked),
        2 => Just(StepPick::BeforeLastAcked),
        2 => Just(StepPick::Checkpoint),
        1 => Just(StepPick::BelowCheckpoint),
        2 => Just(StepPick::OfBatch),
    ]
}

fn nacked() -> impl Strategy<Value = NackPick> {
    select(vec![NackPick::Whole, NackPick::First, NackPick::First, NackPick::All, NackPick::Foreign])
}

fn version() -> impl Strategy<Value = VersionPick> {
    prop_oneof![
        4 => (1..3_i64).prop_map(VersionPick::Above),
        1 => Just(VersionPick::Repeat),
        1 => Just(VersionPick::Same),
        1 => Just(VersionPick::Below),
    ]
}
