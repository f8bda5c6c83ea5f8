//! Workers of all kinds beside a trainer, against anything that gives room: they are killed, fail and name or do not name
//! what they know. While one of them lives, batches are trained.

use std::collections::BTreeMap;

use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Seconds of a tick.
pub(super) const TICK_S: u64 = 10;

/// Ticks of a run.
const TICKS: usize = 240;

/// Ticks within which a batch is trained, whatever happens. Room that nobody uses expires after `TIMEOUT_S`, which is
/// longer, so nothing may wait for that.
const PATIENCE: usize = 140;

/// `group.timeout_s` of the policy.
pub(super) const TIMEOUT_S: u64 = 1_600;

/// `idle_s` of sessions. The session of a killed worker ends then.
pub(super) const IDLE_S: u64 = 200;

/// The most ticks that a rollout takes.
const ROLLOUT_TICKS: usize = 3;

/// Groups that single places are played of at a time.
const WINDOW: usize = 6;

/// A policy, and the workers that play for it.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    pub(super) size: u32,
    pub(super) groups: u32,
    pub(super) staleness: u32,
    /// Groups of the environment `slow` that each batch has at least. There is no other environment with a minimum.
    pub(super) minimum: u32,
    pub(super) workers: Vec<Kind>,
    /// A rollout fails, or a worker is killed, in one of so many ticks.
    pub(super) trouble: u32,
    pub(super) seed: u64,
}

/// How a worker works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) plays: Plays,
    pub(super) names_group: bool,
    pub(super) names_environment: bool,
    pub(super) is_slow: bool,
}

/// What a worker plays at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plays {
    /// One place of any group.
    Place,
    /// All missing places of a group.
    Group,
    /// One place of any group, as a session.
    Session,
}

/// A request for room.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) rollouts: u32,
    pub(super) group: Option<String>,
    pub(super) environment: Option<String>,
}

/// A rollout that has ended. It fails without a reward.
#[derive(Clone, Debug)]
pub(super) struct Played {
    pub(super) rollout: String,
    pub(super) group: String,
    pub(super) environment: &'static str,
    pub(super) room: String,
    pub(super) failed: bool,
}

/// What becomes of the group of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Open,
    Decided,
}

/// What gives room, takes rollouts and trains batches.
pub(super) trait Service {
    /// The number of rollouts that may start, with what they name. None if the group is decided.
    async fn ask(&mut self, ask: Ask) -> Option<(u32, String)>;
    /// Opens a session; none without room.
    async fn open(&mut self, rollout: &str, group: &str, environment: Option<&str>) -> Option<String>;
    async fn post(&mut self, played: Played) -> Fate;
    async fn end(&mut self, played: Played) -> Fate;
    /// Whether a batch is there. It is held until the next call of `ack`.
    async fn lease(&mut self) -> bool;
    async fn ack(&mut self, step: i64);
    async fn pass(&mut self);
}

/// A group that workers play.
struct Task {
    environment: &'static str,
    /// Places that nobody plays and that have no rollout.
    missing: u32,
    attempts: u32,
}

struct Work {
    task: String,
    room: String,
    rollout: String,
    ends: usize,
}

/// Plays a scene. Returns the steps that were trained; an error if training stops.
pub(super) async fn play(scene: &Scene, service: &mut impl Service) -> Result<usize, String> {
    let mut random = StdRng::seed_from_u64(scene.seed);
    let mut tasks: BTreeMap<String, Task> = BTreeMap::new();
    let mut own: Vec<Option<String>> = vec![None; scene.workers.len()];
    let mut work: Vec<Vec<Work>> = scene.workers.iter().map(|_| Vec::new()).collect();
    let (mut number, mut steps, mut last, mut holds) = (0, 0, 0, false);
    for tick in 0..TICKS {
        for (at, kind) in scene.workers.iter().copied().enumerate() {
            let environment = if kind.is_slow { "slow" } else { "fast" };
            // One worker is never killed.
            if at > 0 && random.random_range(0..scene.trouble) == 0 {
                for lost in work[at].drain(..) {
                    if let Some(task) = tasks.get_mut(&lost.task) {
                        task.missing += 1;
                    }
                }
                // It goes on with its group, or the group is abandoned for ever.
                if random.random_range(0..2) == 0
                    && let Some(task) = own[at].take()
                {
                    tasks.remove(&task);
                }
            }
            if work[at].is_empty() {
                let task = match &own[at] {
                    Some(task) if tasks.get(task).is_some_and(|task| task.missing > 0) => task.clone(),
                    _ => choose(kind, scene, environment, &mut tasks, &mut number, &mut random),
                };
                own[at] = (kind.plays == Plays::Group).then(|| task.clone());
                let found = tasks.get_mut(&task).expect("it was just chosen");
                let label = kind.names_environment.then_some(environment);
                let missing = if kind.plays == Plays::Group { found.missing } else { found.missing.min(1) };
                for (room, count) in start(service, kind, &task, label, missing, found).await.unwrap_or_default() {
                    // The rest of a group is played as well if there is room for a part of it.
                    for _ in 0..count {
                        found.missing -= 1;
                        found.attempts += 1;
                        let ends = tick + random.random_range(1..=ROLLOUT_TICKS);
                        let rollout = format!("{task}-{}", found.attempts);
                        let rollout = if kind.plays == Plays::Session { room.1.clone() } else { rollout };
                        work[at].push(Work { task: task.clone(), room: room.0.clone(), rollout, ends });
                    }
                }
            }
            for index in (0..work[at].len()).rev().filter(|index| work[at][*index].ends <= tick).collect::<Vec<_>>() {
                let Work { task, room, rollout, .. } = work[at].remove(index);
                let failed = random.random_range(0..scene.trouble * 2) == 0;
                let played = Played { rollout, group: task.clone(), environment, room, failed };
                let fate = match kind.plays {
                    Plays::Session => service.end(played).await,
                    Plays::Place | Plays::Group => service.post(played).await,
                };
                if fate == Fate::Decided {
                    tasks.remove(&task);
                } else if let Some(task) = tasks.get_mut(&task).filter(|_| failed) {
                    task.missing += 1;
                }
            }
        }
        if holds {
            steps += 1;
            last = tick;
            service.ack(steps as i64).await;
        }
        holds = service.lease().await;
        if tick - last > PATIENCE {
            return Err(format!("no step since tick {last} of {tick}, after {steps} steps"));
        }
        service.pass().await;
    }
    Ok(steps)
}

/// The group that a worker plays: for single places a group of the window that has missing ones.
fn choose(
    kind: Kind,
    scene: &Scene,
    environment: &'static str,
    tasks: &mut BTreeMap<String, Task>,
    number: &mut u32,
    random: &mut StdRng,
) -> String {
    let begins = format!("{environment}-{}", if kind.plays == Plays::Group { "own" } else { "any" });
    let open: Vec<String> = tasks.keys().filter(|name| name.starts_with(&begins)).cloned().collect();
    let with_places: Vec<&String> = open.iter().filter(|name| tasks[*name].missing > 0).collect();
    if kind.plays != Plays::Group && !with_places.is_empty() && open.len() >= WINDOW {
        return with_places[random.random_range(0..with_places.len())].clone();
    }
    *number += 1;
    let name = format!("{begins}-{number}");
    tasks.insert(name.clone(), Task { environment, missing: scene.size, attempts: 0 });
    name
}

type Started = Vec<((String, String), u32)>;

/// Asks for room for missing places. None if the group is decided.
async fn start(
    service: &mut impl Service,
    kind: Kind,
    task: &str,
    label: Option<&str>,
    missing: u32,
    found: &mut Task,
) -> Option<Started> {
    if missing == 0 {
        return None;
    }
    if kind.plays == Plays::Session {
        let rollout = format!("{task}-s{}", found.attempts);
        found.attempts += 1;
        let room = service.open(&rollout, task, label.or(Some(found.environment))).await?;
        return Some(vec![((room, rollout), 1)]);
    }
    let group = kind.names_group.then(|| task.to_owned());
    let ask = Ask { rollouts: missing, group, environment: label.map(str::to_owned) };
    match service.ask(ask).await {
        Some((0, _)) => None,
        Some((_, room)) => Some(vec![((room, String::new()), missing)]),
        // What is decided is not played any more; the next choice is another group.
        None => {
            found.missing = 0;
            None
        }
    }
}
