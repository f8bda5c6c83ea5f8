//! Admissions in the store: room is reserved under the lock of the policy's row, and posts use it under the lock of the
//! admission's row.

mod standing;

use async_trait::async_trait;
use forebay_domain::{
    admission::{
        Admit, Admitted, Backlog, Room, RoomRequest,
        refused::RoomFor,
        room::{Asked, AskedGroup},
    },
    clock::Timestamp,
    ids::{AdmissionId, GroupId, IdKey, PolicyName, PolicyPk, Version},
    policies::Policy,
    refusal::Refusal,
    states::{GroupState, RolloutState},
    tally::Tally,
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::LazyLock,
};

use super::{fill, ingest::work::Incoming, policy};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Arg, Statement, Tx, among_keys, args, key_list, locking},
    tally::TallyDelta,
};

pub(super) use self::standing::{grant, next_batch, note, reserved_of};

/// Admissions with the room that no rollout has used, locked.
macro_rules! select_admissions {
    ($name:literal, $tail:literal) => {
        locking!(concat!(
            $name,
            "
            SELECT admission_pk, policy_pk, granted - used AS unused
            FROM admission
            ",
            $tail
        ))
    };
}

#[async_trait]
impl Op for Admit {
    type Output = Result<Admitted, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(policy) = policy::lock(tx, &self.request.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.request.policy.clone())));
        };
        let request = &self.request;
        let key = request.group_id.as_ref().map(GroupId::key);
        let group = match key {
            Some(key) => match asked_group(tx, &policy, request, key).await? {
                Ok(group) => Some(group),
                Err(refusal) => return Ok(Err(refusal)),
            },
            None => None,
        };
        let environment = request.environment.as_deref();
        let asked = Asked { rollouts: request.rollouts, group, environment };
        let granted = grant(tx, &policy, RoomFor::Admission, &asked, self.now).await?;
        let expires_at = self.now.plus_seconds(policy.rules.group.timeout_s);
        if let Ok(rollouts) = granted {
            let reservation = Reservation {
                admission_id: self.admission_id,
                rollouts,
                expires_at,
                group: key.zip(group.map(|group| group.size)),
                environment,
                granted_at: Some(self.now),
            };
            reserve(tx, &policy, reservation).await?;
        }
        Ok(Ok(Admitted {
            admission_id: self.admission_id,
            granted: granted.as_ref().copied().unwrap_or(0),
            refused: granted.err(),
            version: policy.version,
            expires_at,
        }))
    }
}

/// The group that a request names.
async fn asked_group(
    tx: &mut Tx<'_>,
    policy: &Policy,
    request: &RoomRequest,
    key: IdKey,
) -> Result<Result<AskedGroup, Refusal>, StoreError> {
    const FIND_GROUP: Statement = Statement::new(
        "-- find_group_of_admission
        SELECT rules_pk, state, size, kept, masked, dropped, scoring
        FROM rollout_group
        WHERE policy_pk = $1 AND run = $2 AND group_key = $3",
    );
    let (mut found, mut left) = (None, None);
    if let Some(mut row) = tx.fetch_optional(FIND_GROUP, args![policy.policy_pk, policy.run, key]).await? {
        let rules = tx.rules(row.get("rules_pk")?).await?;
        let group = fill(&mut row, "state")?;
        if !group.state.is_open() {
            return Ok(Err(Refusal::GroupDecided(group.state)));
        }
        left = Some(group.places_left(rules.group.on_drop));
        found = Some(group);
    }
    let (reserved, named_size) = reserved_of(tx, policy, key).await?;
    let known = found.map(|found| found.size).or(named_size);
    if let (Some(known), Some(declared)) = (known, request.group_size)
        && known != declared
    {
        let detail = format!("the group has size {known}, fixed by what began it");
        return Ok(Err(Refusal::invalid("/group_size", detail)));
    }
    let size = known.or(request.group_size).unwrap_or(policy.rules.group.size);
    Ok(Ok(AskedGroup { size, missing: left.unwrap_or(size), reserved, has_begun: found.is_some() || reserved > 0 }))
}

/// Gives back the expired room of a policy whose row is locked, in case the sweep has not done so.
async fn give_back_expired(tx: &mut Tx<'_>, policy: &Policy, now: Timestamp) -> Result<(), StoreError> {
    const SELECT_EXPIRED: Statement = select_admissions!(
        "-- select_expired_admissions_of_policy",
        "WHERE policy_pk = $1 AND expires_us <= $2
        ORDER BY admission_pk"
    );
    give_back(tx, SELECT_EXPIRED, args![policy.policy_pk, now]).await.map(drop)
}

/// Gives back the room for groups that are decided: an agent that was restarted has asked for it a second time. The room
/// of sessions stays, because their posts name it.
async fn give_back_decided(tx: &mut Tx<'_>, policy: &Policy) -> Result<(), StoreError> {
    const SELECT_OF_DECIDED: Statement = select_admissions!(
        "-- select_admissions_of_decided_groups",
        "WHERE policy_pk = $1 AND granted_us IS NOT NULL AND EXISTS (
            SELECT 1
            FROM rollout_group AS g
            WHERE g.policy_pk = $1 AND g.run = $2 AND g.group_key = admission.group_key AND g.state <> 'open'
        )
        ORDER BY admission_pk"
    );
    give_back(tx, SELECT_OF_DECIDED, args![policy.policy_pk, policy.run]).await.map(drop)
}

/// Room to reserve.
pub(super) struct Reservation<'a> {
    pub(super) admission_id: AdmissionId,
    pub(super) rollouts: u32,
    pub(super) expires_at: Timestamp,
    /// The group of the rollouts and its size, if they are known.
    pub(super) group: Option<(IdKey, u32)>,
    pub(super) environment: Option<&'a str>,
    /// None for the room of a session.
    pub(super) granted_at: Option<Timestamp>,
}

/// Reserves room for rollouts of a policy whose row is locked.
pub(super) async fn reserve(tx: &mut Tx<'_>, policy: &Policy, reservation: Reservation<'_>) -> Result<(), StoreError> {
    const INSERT_ADMISSION: Statement = Statement::new(
        "-- insert_admission
        INSERT INTO admission (
            admission_id, policy_pk, granted, used, version, expires_us, group_key, group_size, environment, granted_us
        )
        VALUES ($1, $2, $3, 0, $4, $5, $6, $7, $8, $9)",
    );
    let Reservation { admission_id, rollouts, expires_at, group, environment, granted_at } = reservation;
    let values = args![
        admission_id.as_bytes(),
        policy.policy_pk,
        rollouts,
        policy.version,
        expires_at,
        group.as_ref().map(|(key, _)| key.as_bytes()),
        group.map(|(_, size)| i64::from(size)),
        environment,
        granted_at.map(Timestamp::as_micros),
    ];
    tx.guarded(INSERT_ADMISSION, values, 1).await?;
    tx.tallies().add(policy.policy_pk, Tally::Reserved, i64::from(rollouts));
    Ok(())
}

/// The work of a policy that is not yet trained, as stored.
#[derive(Default)]
pub(super) struct StoredBacklog(BTreeMap<Tally, i64>);

/// The tallies of rollouts that wait to be trained.
fn live_rollouts() -> impl Iterator<Item = Tally> {
    RolloutState::ALL.iter().filter(|state| state.is_live()).map(|state| Tally::Rollouts(*state))
}

/// The change of a policy's backlog in some counts.
pub(super) fn added_backlog(policy: PolicyPk, tallies: &TallyDelta) -> Backlog {
    StoredBacklog::default().with(policy, tallies)
}

impl StoredBacklog {
    pub(super) async fn read(tx: &mut Tx<'_>, policy: PolicyPk) -> Result<Self, StoreError> {
        static SELECT_BACKLOG: LazyLock<Statement> = LazyLock::new(|| {
            let others = [Tally::LiveBytes, Tally::Reserved, Tally::Groups(GroupState::Ready)];
            let tallies = live_rollouts().chain(others);
            let names: Vec<String> = tallies.map(|tally| format!("'{}'", tally.name())).collect();
            Statement::new(String::leak(format!(
                "-- select_backlog
                SELECT name, CAST(SUM(value) AS BIGINT) AS value
                FROM tally_now
                WHERE policy_pk = $1 AND name IN ({})
                GROUP BY name",
                names.join(", ")
            )))
        });
        let mut stored = BTreeMap::new();
        for mut row in tx.fetch_all(*SELECT_BACKLOG, args![policy]).await? {
            let tally = Tally::parse(&row.get::<String>("name")?);
            stored.extend(tally.zip(Some(row.get::<i64>("value")?)));
        }
        Ok(Self(stored))
    }

    /// The backlog with the counts of this transaction, which statements do not see yet.
    pub(super) fn with(&self, policy: PolicyPk, tallies: &TallyDelta) -> Backlog {
        let count = |tally| self.count(policy, tallies, tally);
        Backlog {
            rollouts: live_rollouts().map(count).sum(),
            bytes: count(Tally::LiveBytes),
            reserved: count(Tally::Reserved),
        }
    }

    /// One of the counts that are read, with those of this transaction.
    fn count(&self, policy: PolicyPk, tallies: &TallyDelta, tally: Tally) -> u64 {
        let count = self.0.get(&tally).copied().unwrap_or(0) + tallies.pending(policy, tally);
        count.max(0) as u64
    }
}

/// The locked admissions that the posts of a transaction name.
#[derive(Default)]
pub(super) struct Allowances(BTreeMap<Named, Option<Allowance>>);

type Named = (AdmissionId, PolicyName);

/// An admission that has not expired.
struct Allowance {
    admission_pk: i64,
    policy_pk: PolicyPk,
    unused: usize,
    used: usize,
    version: Version,
}

/// The rooms of the rollouts of a bundle.
#[derive(Default)]
pub(super) struct Rooms {
    rooms: HashMap<(PolicyName, IdKey), Room>,
    taken: Vec<(Named, usize)>,
}

impl Rooms {
    pub(super) fn of(&self, incoming: &Incoming<'_>) -> Room {
        // Most bundles name no admission.
        if self.rooms.is_empty() {
            return Room::Unnamed;
        }
        let key = (incoming.new.policy.clone(), incoming.rollout_key);
        self.rooms.get(&key).copied().unwrap_or(Room::Unnamed)
    }
}

impl Allowances {
    /// Locks the admissions that new rollouts name, in the order of their ids.
    pub(super) async fn lock(
        tx: &mut Tx<'_>,
        policies: &BTreeMap<PolicyName, Policy>,
        newcomers: &[&Incoming<'_>],
        now: Timestamp,
    ) -> Result<Self, StoreError> {
        const LOCK_ADMISSION: Statement = locking!(
            "-- lock_admission
            SELECT admission_pk, granted - used AS unused, version
            FROM admission
            WHERE admission_id = $1 AND policy_pk = $2 AND expires_us > $3"
        );
        let mut allowances: BTreeMap<Named, Option<Allowance>> = newcomers
            .iter()
            .filter_map(|incoming| Some(((incoming.new.admission_id?, incoming.new.policy.clone()), None)))
            .collect();
        for ((admission_id, policy), allowance) in &mut allowances {
            let policy_pk = policies[policy].policy_pk;
            let row = tx.fetch_optional(LOCK_ADMISSION, args![admission_id.as_bytes(), policy_pk, now]).await?;
            if let Some(mut row) = row {
                *allowance = Some(Allowance {
                    admission_pk: row.get("admission_pk")?,
                    policy_pk,
                    unused: row.get::<u64>("unused")? as usize,
                    used: 0,
                    version: row.get("version")?,
                });
            }
        }
        Ok(Self(allowances))
    }

    /// The room that is left for each new rollout of a bundle, in its order.
    pub(super) fn rooms(&self, newcomers: &[&Incoming<'_>]) -> Rooms {
        let mut rooms = Rooms::default();
        let mut by_admission: BTreeMap<Named, Vec<IdKey>> = BTreeMap::new();
        for incoming in newcomers {
            let Some(admission_id) = incoming.new.admission_id else { continue };
            let named = by_admission.entry((admission_id, incoming.new.policy.clone())).or_default();
            // If a bundle has the same rollout twice, it counts once.
            if !named.contains(&incoming.rollout_key) {
                named.push(incoming.rollout_key);
            }
        }
        for (name, named) in by_admission {
            let allowance = self.0.get(&name).and_then(Option::as_ref);
            let room = allowance.map_or(Room::Lapsed, |allowance| Room::Reserved(allowance.version));
            let taken = allowance.map_or(0, |allowance| named.len().min(allowance.unused));
            for (place, rollout) in named.into_iter().enumerate() {
                rooms.rooms.insert((name.1.clone(), rollout), if place < taken { room } else { Room::Lapsed });
            }
            rooms.taken.push((name, taken));
        }
        rooms
    }

    /// Uses up the room of an accepted bundle.
    pub(super) fn use_up(&mut self, rooms: &Rooms, tallies: &mut TallyDelta) {
        for (name, taken) in &rooms.taken {
            if let Some(allowance) = self.0.get_mut(name).and_then(Option::as_mut) {
                allowance.unused -= taken;
                allowance.used += taken;
                tallies.add(allowance.policy_pk, Tally::Reserved, -(*taken as i64));
            }
        }
    }

    /// Writes how much room was used.
    pub(super) async fn write(self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        const USE_ADMISSION: Statement = Statement::new(
            "-- use_admission
            UPDATE admission
            SET used = used + $2
            WHERE admission_pk = $1",
        );
        for allowance in self.0.into_values().flatten().filter(|allowance| allowance.used > 0) {
            tx.guarded(USE_ADMISSION, args![allowance.admission_pk, allowance.used], 1).await?;
        }
        Ok(())
    }
}

/// Gives back the room of a run that has ended.
pub(super) async fn void(tx: &mut Tx<'_>, policy: PolicyPk) -> Result<(), StoreError> {
    const SELECT_ALL: Statement = select_admissions!(
        "-- select_admissions_of_policy",
        "WHERE policy_pk = $1
            ORDER BY admission_pk"
    );
    give_back(tx, SELECT_ALL, args![policy]).await.map(drop)
}

/// Deletes the admissions that a statement selects, and gives their room back.
async fn give_back(tx: &mut Tx<'_>, select: Statement, values: Vec<Arg>) -> Result<u64, StoreError> {
    const DELETE_ADMISSIONS: Statement = among_keys!(
        "-- delete_admissions
        DELETE FROM admission
        WHERE admission_pk"
    );
    let mut keys = Vec::new();
    for mut row in tx.fetch_all(select, values).await? {
        keys.push(row.get::<i64>("admission_pk")?);
        tx.tallies().add(row.get("policy_pk")?, Tally::Reserved, -row.get::<i64>("unused")?);
    }
    let count = keys.len();
    if count > 0 {
        tx.guarded(DELETE_ADMISSIONS, args![key_list(keys)], count).await?;
    }
    Ok(count as u64)
}

/// Sweep: gives back the room of expired admissions, up to `limit` of them. Returns how many there were.
pub struct ExpireAdmissions {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for ExpireAdmissions {
    type Output = u64;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<u64, StoreError> {
        const SELECT_EXPIRED: Statement = select_admissions!(
            "-- select_expired_admissions",
            "WHERE expires_us <= $1
            ORDER BY expires_us
            LIMIT $2"
        );
        give_back(tx, SELECT_EXPIRED, args![self.now, self.limit]).await
    }
}
