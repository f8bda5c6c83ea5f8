//! `forebay score`: a program that grades is a scorer.
//!
//! Each job leases one item at a time, runs the program on it, and extends the lease meanwhile. The program and what it has
//! started form a process group, which is killed with its item, so that nothing of an item whose lease is lost goes on. Only
//! `kill -9` of this command, or a program that leaves its process group, leaves something that runs.

use std::{
    ffi::OsString,
    io::{ErrorKind, Write as _, stderr, stdout},
    process::{ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use clap::Args;
use forebay_client::{
    Client, ClientError,
    wire::{
        ScoreExtendRequest, ScoreInclude, ScoreItem, ScoreItemRollout, ScoreLeaseRequest, ScoreRequest, ScoreWorkPer,
    },
};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use uuid::Uuid;

use super::{service::ServiceArgs, text::shown};

/// How long one request waits for work.
const WAIT_MS: u64 = 30_000;

/// Pause before the next attempt while the service cannot be reached.
const AGAIN: Duration = Duration::from_secs(1);

/// Pause after the first of several failures in a row, and the longest. A program that always fails at once would use up the
/// attempts of all work.
const FAILED_PAUSE: Duration = Duration::from_millis(100);
const FAILED_PAUSE_MAX: Duration = Duration::from_secs(10);

/// How long the pipes of a program that has ended may stay open: something that left its process group may have them.
const PIPES_AFTER_END: Duration = Duration::from_secs(1);

/// The end of what a program prints that is kept.
const TAIL_BYTES: usize = 256 << 10;

/// The longest reason of a failed attempt.
const REASON_BYTES: usize = 1_024;

/// The arguments of `forebay score`.
#[derive(Args)]
pub(crate) struct ScoreArgs {
    /// Name of the score; several, if the program looks at the `name` in its input
    #[arg(long, value_name = "NAME", required = true)]
    name: Vec<String>,
    /// Policy of the rollouts
    #[arg(long, default_value = "default")]
    policy: String,
    /// How many programs run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: u32,
    /// What of a rollout its input has
    #[arg(long, value_name = "PARTS", value_delimiter = ',', default_value = "messages,metadata")]
    include: Vec<Part>,
    /// Seconds after which a program is killed; its attempt has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Seconds of a lease, which is extended while the program runs: the work of a scorer that dies is given to the next one
    /// after them
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    lease_s: u64,
    /// Name of the scorer [default: the id of the key, or `anonymous`]
    #[arg(long, value_name = "NAME")]
    scorer: Option<String>,
    #[command(flatten)]
    service: ServiceArgs,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Part {
    Messages,
    Metadata,
    Text,
    Segments,
}

impl From<Part> for ScoreInclude {
    fn from(part: Part) -> Self {
        match part {
            Part::Messages => Self::Messages,
            Part::Metadata => Self::Metadata,
            Part::Text => Self::Text,
            Part::Segments => Self::Segments,
        }
    }
}

/// Scores until a signal comes. The items that are being graded then are finished first; a second signal ends them.
pub(crate) async fn score(args: ScoreArgs) -> anyhow::Result<()> {
    let signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
    let [interrupt, terminate, hangup] = signals;
    let mut signals = [interrupt?, terminate?, hangup?];
    let mut any = async || {
        let [interrupt, terminate, hangup] = &mut signals;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    };
    let (stop, stopping) = watch::channel(false);
    let client = args.service.client()?;
    let jobs = args.jobs;
    let scorer = Arc::new(Scorer { args, client, stopping, has_run: AtomicBool::new(false) });
    // The first answer shows whether the address, the key and the names are right.
    let first = tokio::select! {
        first = scorer.lease(0) => first,
        () = any() => return Ok(()),
    };
    let mut first = first.map_err(|error| scorer.args.service.failed(error))?;
    let mut running = JoinSet::new();
    for _ in 0..jobs {
        let (scorer, first) = (Arc::clone(&scorer), first.take());
        running.spawn(async move { scorer.work(first).await });
    }
    loop {
        tokio::select! {
            ended = running.join_next() => match ended {
                Some(ended) => ended.context("a job has panicked")??,
                None => return Ok(()),
            },
            () = any() => {
                // Dropping the jobs ends their programs.
                if stop.send_replace(true) {
                    return Ok(());
                }
            }
        }
    }
}

struct Scorer {
    args: ScoreArgs,
    client: Client,
    stopping: watch::Receiver<bool>,
    /// Whether the program has been started once.
    has_run: AtomicBool,
}

/// Why an item has no score.
enum Failed {
    /// The program cannot be run at all.
    NotRun(String),
    Item(String),
}

impl Failed {
    fn reason(&self) -> &str {
        match self {
            Self::NotRun(reason) | Self::Item(reason) => reason,
        }
    }
}

/// What a program reads: a rollout, or the rollouts of a group.
#[derive(Serialize)]
struct Input<'a> {
    policy: &'a str,
    name: &'a str,
    group_id: &'a str,
    attempt: u32,
    max_attempts: u32,
    #[serde(flatten)]
    rollout: Option<&'a ScoreItemRollout>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rollouts: Option<&'a [ScoreItemRollout]>,
}

impl Scorer {
    /// Leases one item, if there is one in time.
    async fn lease(&self, wait_ms: u64) -> Result<Option<ScoreItem>, ClientError> {
        let args = &self.args;
        let request = ScoreLeaseRequest {
            policy: Some(args.policy.clone()),
            names: args.name.clone(),
            max: Some(1),
            wait_ms: Some(wait_ms),
            scorer: args.scorer.clone(),
            request_id: Some(Uuid::new_v4().to_string()),
            ttl_s: Some(args.lease_s),
            include: args.include.iter().copied().map(Into::into).collect(),
        };
        Ok(self.client.lease_scores(&request).await?.pop())
    }

    /// One job: item after item, until the scorer stops.
    async fn work(&self, first: Option<ScoreItem>) -> anyhow::Result<()> {
        let mut stopping = self.stopping.clone();
        let mut pause = FAILED_PAUSE;
        let mut fails = false;
        let mut next = first;
        loop {
            let leased = if let Some(item) = next.take() {
                Ok(Some(item))
            } else {
                tokio::select! {
                    leased = self.lease(WAIT_MS) => leased,
                    _ = stopping.wait_for(|stopping| *stopping) => return Ok(()),
                }
            };
            match leased {
                Ok(Some(item)) => {
                    if self.settle(&item).await? {
                        pause = FAILED_PAUSE;
                    } else {
                        tokio::select! {
                            () = sleep(pause) => {}
                            _ = stopping.wait_for(|stopping| *stopping) => return Ok(()),
                        }
                        pause = (pause * 2).min(FAILED_PAUSE_MAX);
                    }
                }
                Ok(None) => {}
                Err(error) if may_pass(&error) => {
                    if !fails {
                        say(&format!("{:#}; asking again", anyhow!(error)));
                    }
                    fails = true;
                    sleep(AGAIN).await;
                    continue;
                }
                Err(error) => return Err(self.args.service.failed(error)),
            }
            fails = false;
        }
    }

    /// Grades an item and posts what came of it, as long as the lease is alive. Returns whether it was scored. It is an error
    /// if the program cannot be run, because it cannot be run on other items either.
    async fn settle(&self, item: &ScoreItem) -> anyhow::Result<bool> {
        let what = what(item);
        let graded = tokio::select! {
            graded = self.grade(item) => Some(graded),
            () = self.until_lost(item) => None,
        };
        let (line, outcome) = match graded {
            Some(graded) => {
                // The answer to the post says whether the lease was alive. What it has settled itself is not lost.
                let extending = async {
                    self.until_lost(item).await;
                    std::future::pending().await
                };
                let posted = tokio::select! {
                    posted = self.post(item, &graded) => posted,
                    posted = extending => posted,
                };
                let outcome = match &graded {
                    Err(Failed::NotRun(why)) => Err(anyhow!("{why}")),
                    graded => Ok(graded.is_ok() && posted.is_ok()),
                };
                let line = match (posted, graded) {
                    (Ok(()), Ok(values)) => {
                        let values: Vec<String> = values.iter().map(f64::to_string).collect();
                        format!("{what} {}", values.join(" "))
                    }
                    (Ok(()), Err(failed)) => {
                        let reason = shown(failed.reason());
                        format!("{what} failed, attempt {} of {}: {reason}", item.attempt, item.max_attempts)
                    }
                    (Err(error), _) => format!("{what} was not stored: {:#}", anyhow!(error)),
                };
                (line, outcome)
            }
            None => (format!("{what}: the lease is lost; the work goes to another scorer"), Ok(true)),
        };
        // Nobody reading is no reason to end.
        let _ = writeln!(stdout(), "{line}");
        outcome
    }

    /// Extends the lease three times within its time. Returns when it is lost.
    async fn until_lost(&self, item: &ScoreItem) {
        let ttl = Duration::from_millis(u64::try_from(item.expires_in_ms).unwrap_or(0).max(1_000));
        let request = ScoreExtendRequest {
            policy: Some(item.policy.clone()),
            leases: vec![item.lease.clone()],
            ttl_s: Some(ttl.as_secs().max(1)),
        };
        let mut expires = Instant::now() + ttl;
        loop {
            sleep_until(expires.min(Instant::now() + ttl / 3)).await;
            match timeout(ttl / 3, self.client.extend_scores(&request)).await {
                Ok(Ok(extended)) if extended.lost.is_empty() => expires = Instant::now() + ttl,
                Ok(Err(_)) | Err(_) if Instant::now() < expires => {}
                _ => return,
            }
        }
    }

    /// Runs the program on an item. Returns a score for each rollout.
    async fn grade(&self, item: &ScoreItem) -> Result<Vec<f64>, Failed> {
        let (program, arguments) = self.args.program.split_first().expect("a program is required");
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.process_group(0).spawn();
        let child = child.map_err(|error| {
            let why = format!("{} cannot be run: {error}", program.display());
            // Everything else may pass, such as a lack of memory, and so may this while a program is replaced.
            let is_for_good = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied)
                && !self.has_run.load(Ordering::Relaxed);
            if is_for_good { Failed::NotRun(why) } else { Failed::Item(why) }
        })?;
        self.has_run.store(true, Ordering::Relaxed);
        let mut group = Group(child);
        let limit = Duration::from_secs(self.args.timeout_s);
        let ran = timeout(limit, group.run(input(item))).await;
        let Ok(ran) = ran else {
            return Err(Failed::Item(format!("timeout: it ran for more than {} s", self.args.timeout_s)));
        };
        let (status, output, errors) =
            ran.map_err(|error| Failed::Item(format!("it cannot be waited for: {error}")))?;
        if !status.success() {
            let said = last_line(&errors);
            return Err(Failed::Item(if said.is_empty() { status.to_string() } else { format!("{status}: {said}") }));
        }
        values(item, last_line(&output)).map_err(Failed::Item)
    }

    /// Posts scores or the failure, again and again while the service cannot be reached.
    async fn post(&self, item: &ScoreItem, graded: &Result<Vec<f64>, Failed>) -> Result<(), ClientError> {
        let request = |rollout: &ScoreItemRollout| ScoreRequest {
            policy: Some(item.policy.clone()),
            rollout_id: rollout.rollout_id.clone(),
            name: item.name.clone(),
            lease: Some(item.lease.clone()),
            ..ScoreRequest::default()
        };
        let refused = |reason: &str, rollout: &ScoreItemRollout| ScoreRequest {
            failed: Some(shortened(reason)),
            ..request(rollout)
        };
        let requests: Vec<ScoreRequest> = match graded {
            Ok(values) => {
                let lacks = |rollout: &&ScoreItemRollout| rollout.scoring.contains(&item.name);
                let scored = item.rollouts.iter().zip(values).filter(|(rollout, _)| lacks(rollout));
                scored.map(|(rollout, value)| ScoreRequest { value: Some(*value), ..request(rollout) }).collect()
            }
            Err(failed) => item.rollouts.first().map(|rollout| refused(failed.reason(), rollout)).into_iter().collect(),
        };
        for part in requests.chunks(POST_MAX) {
            loop {
                match self.client.score(part).await {
                    Ok(_) => break,
                    Err(error) if may_pass(&error) => sleep(AGAIN).await,
                    // A repeat after a lost answer.
                    Err(error) if graded.is_err() && error.kind() == Some("lease-lost") => break,
                    Err(error) => {
                        // The next scorer need not wait for the end of the lease.
                        if let Some(rollout) = item.rollouts.first() {
                            let _ = self.client.score(&[refused(&error.to_string(), rollout)]).await;
                        }
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}

/// The most scores of one post.
const POST_MAX: usize = 256;

/// What a line of the output is about.
fn what(item: &ScoreItem) -> String {
    match item.per {
        ScoreWorkPer::Rollout => {
            let id = item.rollouts.first().map_or("", |rollout| &rollout.rollout_id);
            format!("{} {}", shown(id), shown(&item.name))
        }
        ScoreWorkPer::Group => format!("group {} {}", shown(&item.group_id), shown(&item.name)),
    }
}

fn input(item: &ScoreItem) -> Vec<u8> {
    let is_group = item.per == ScoreWorkPer::Group;
    let input = Input {
        policy: &item.policy,
        name: &item.name,
        group_id: &item.group_id,
        attempt: item.attempt,
        max_attempts: item.max_attempts,
        rollout: item.rollouts.first().filter(|_| !is_group),
        rollouts: is_group.then_some(&item.rollouts),
    };
    let mut text = serde_json::to_vec(&input).expect("an item is plain data and checked JSON");
    text.push(b'\n');
    text
}

/// Reads the score of a rollout, or an array with one for each rollout of a group.
fn values(item: &ScoreItem, line: &str) -> Result<Vec<f64>, String> {
    let printed = || format!("the last line that it printed is `{line}`");
    let values: Vec<f64> = match item.per {
        ScoreWorkPer::Rollout => {
            vec![line.parse().map_err(|_| format!("{}, which is no number", printed()))?]
        }
        ScoreWorkPer::Group => {
            let values: Option<Vec<f64>> = serde_json::from_str(line).ok();
            let wanted = item.rollouts.len();
            values.filter(|values| values.len() == wanted).ok_or_else(|| {
                format!("{}, which is no JSON array of {wanted} numbers, one for each of `rollouts`", printed())
            })?
        }
    };
    if values.iter().all(|value| value.is_finite()) {
        Ok(values)
    } else {
        Err(format!("{}, which is not finite", printed()))
    }
}

/// A program with everything that it has started, which is killed when this is dropped.
struct Group(Child);

impl Group {
    /// Feeds the program and waits for it. Returns the ends of what it printed.
    async fn run(&mut self, input: Vec<u8>) -> std::io::Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
        let child = &mut self.0;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(output), Some(errors)) = pipes else { unreachable!("all of them are pipes") };
        let (printed, complained) = (Mutex::default(), Mutex::default());
        let group = child.id();
        let exit = async {
            let status = child.wait().await;
            // What it has left in the background would hold the pipes open.
            kill(group);
            status
        };
        let feed = async move {
            // A program may end, or close its input, before it has read everything.
            let _ = stdin.write_all(&input).await;
        };
        let talk = async {
            tokio::join!(feed, tail(output, &printed, false), tail(errors, &complained, true));
        };
        tokio::pin!(talk);
        let (status, is_silent) = {
            tokio::pin!(exit);
            tokio::select! {
                status = &mut exit => (status, false),
                () = &mut talk => (exit.await, true),
            }
        };
        if !is_silent {
            let _ = timeout(PIPES_AFTER_END, talk).await;
        }
        let kept = |of: &Mutex<Vec<u8>>| std::mem::take(&mut *of.lock().unwrap_or_else(PoisonError::into_inner));
        Ok((status?, kept(&printed), kept(&complained)))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        kill(self.0.id());
    }
}

/// Kills a process group whose first process has not been waited for, or has just been.
fn kill(group: Option<u32>) {
    let group = group.and_then(|id| Pid::from_raw(id.cast_signed()));
    if let Some(group) = group {
        // It fails if nothing is left.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Reads to the end, and keeps the last bytes. With `shows`, everything is printed as well.
async fn tail(mut pipe: impl AsyncRead + Unpin, kept: &Mutex<Vec<u8>>, shows: bool) {
    let mut buffer = vec![0; 8 << 10];
    // A pipe that cannot be read says no more.
    while let Ok(read @ 1..) = pipe.read(&mut buffer).await {
        if shows {
            let _ = stderr().write_all(&buffer[..read]);
        }
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(&buffer[..read]);
        if kept.len() > 2 * TAIL_BYTES {
            let surplus = kept.len() - TAIL_BYTES;
            kept.drain(..surplus);
        }
    }
}

/// The last line that is not empty; nothing of it if it is not UTF-8.
fn last_line(printed: &[u8]) -> &str {
    let mut lines = printed.rsplit(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    lines.find(|line| !line.is_empty()).and_then(|line| str::from_utf8(line).ok()).unwrap_or_default()
}

/// A reason as the service takes it.
fn shortened(reason: &str) -> String {
    let text: String = reason.chars().map(|character| if character.is_control() { ' ' } else { character }).collect();
    text[..text.floor_char_boundary(REASON_BYTES)].to_owned()
}

/// Whether the same call may succeed later.
fn may_pass(error: &ClientError) -> bool {
    match error {
        ClientError::Transport(_) | ClientError::Unexpected { .. } | ClientError::Truncated { .. } => true,
        ClientError::Refused(problem) => problem.status >= 500 || problem.status == 429,
        _ => false,
    }
}

fn say(line: &str) {
    let _ = writeln!(stderr(), "forebay: {line}");
}
