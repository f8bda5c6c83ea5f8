//! `forebay demo`: agents, an engine and trainers that need nothing but this program. They use its service over HTTP as any
//! client does. All of it is in one process, so that nothing is left behind however it ends.

mod engine;
mod learner;
mod table;
mod team;

use std::{
    collections::BTreeMap,
    io::{Write as _, stdout},
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Args;
use forebay::config::Config;
use forebay_client::{
    Client, install_tls_provider,
    wire::{
        BatchRules, FilterAction, FilterRule, FilterScope, GroupRules, PolicyRules, PolicyStats, RetentionRules,
        StalenessRules,
    },
};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    time::{Instant, sleep, timeout},
};

use self::{
    engine::Engine,
    learner::{Learner, Progress, REMEMBERED_STEPS},
    table::{DIGITS, Table, VERDICTS},
    team::{Agent, CHECKER, GROUP_SIZE, SOLVER, Scores},
};
use super::serve::{Start, serve_until};

/// Agents, each of which plays a group at a time.
const AGENTS: u32 = 8;

/// The step of the solver after which its learner is killed. The last checkpoint is three steps older.
const KILLED_AFTER: i64 = 13;

/// How often the sums change in a demo that goes on. Within this time, the policies learn them.
const SHIFT_EVERY: Duration = Duration::from_secs(90);

/// How often a line says how it goes.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// How long the totals at the end may take.
const SUM_TIMEOUT: Duration = Duration::from_secs(5);

/// How long tasks may take to end before the folder is removed.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The arguments of `forebay demo`.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Go on until Ctrl-C
    #[arg(long)]
    serve: bool,
    /// Stop after so many seconds
    #[arg(long, value_name = "N", default_value_t = 60, conflicts_with = "serve")]
    seconds: u64,
    /// Stop earlier, after so many optimizer steps of the solver
    #[arg(long, value_name = "N", conflicts_with = "serve", value_parser = clap::value_parser!(i64).range(KILLED_AFTER + 1..))]
    steps: Option<i64>,
    /// How long the engine takes for an answer, on average
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(..=60_000))]
    think_ms: u64,
    /// Address of the service and its page [default: 127.0.0.1:8080, or a free port if something listens there]
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
}

/// Serves, plays and learns until the time is over.
pub(crate) fn demo(args: &DemoArgs) -> anyhow::Result<()> {
    if let Some(listen) = args.listen.filter(|listen| !listen.ip().is_loopback()) {
        bail!(
            "{listen} can be reached from other machines, and the demo has no keys. To look at it from another machine, let \
             it listen on 127.0.0.1:{port} and forward the port: ssh -L {port}:127.0.0.1:{port} HOST",
            port = if listen.port() == 0 { 8080 } else { listen.port() }
        );
    }
    let folder = tempfile::Builder::new().prefix("forebay-demo-").tempdir().context("no temporary folder")?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    let outcome = runtime.block_on(serve_and_play(args, folder.path()));
    // Nobody reads any more, as behind `| head`.
    let is_unread = |error: &anyhow::Error| {
        error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    };
    runtime.shutdown_timeout(END_TIMEOUT);
    folder.close().context("the temporary folder cannot be removed")?;
    if outcome.as_ref().is_err_and(is_unread) { Ok(()) } else { outcome }
}

async fn serve_and_play(args: &DemoArgs, folder: &Path) -> anyhow::Result<()> {
    // From here on, signals end the demo and not the process, so that the folder is removed.
    let signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
    let [interrupt, terminate, hangup] = signals;
    let mut signals = [interrupt?, terminate?, hangup?];
    let engine = Engine::new(Duration::from_millis(args.think_ms));
    engine.load(SOLVER, Table::new(DIGITS));
    engine.load(CHECKER, Table::new(VERDICTS));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("the engine cannot listen")?;
    let config = config(folder, args.listen, listener.local_addr()?)?;
    tokio::spawn(engine.clone().serve(listener));
    let port_file = folder.join("port");
    let start = Start { port_file: Some(port_file.clone()), ..Start::default() };
    let (stop, stopping) = oneshot::channel::<()>();
    let service = serve_until(config, start, async {
        // Dropping the other end stops the service, too.
        let _ = stopping.await;
    });
    tokio::pin!(service);
    let outcome = tokio::select! {
        outcome = &mut service => {
            outcome?;
            bail!("the service has ended");
        }
        outcome = play(args, folder, &engine, &port_file, &mut signals) => outcome,
    };
    drop(stop);
    // A second signal does not wait for the service.
    tokio::select! {
        stopped = service => stopped?,
        () = any(&mut signals) => {}
    }
    outcome
}

/// The configuration of the service: a temporary database, and the engine for sessions.
fn config(folder: &Path, listen: Option<SocketAddr>, engine: SocketAddr) -> anyhow::Result<Config> {
    let tokenizer = folder.join("tokenizer.json");
    std::fs::write(&tokenizer, table::tokenizer().to_string())?;
    let upstream = |policy: &str| {
        toml::Value::from(toml::Table::from_iter([
            ("name".to_owned(), toml::Value::from(policy)),
            ("kind".to_owned(), "openai".into()),
            ("urls".to_owned(), vec![format!("http://{engine}")].into()),
            ("policies".to_owned(), vec![policy].into()),
        ]))
    };
    let text = toml::to_string(&toml::Table::from_iter([
        ("listen".to_owned(), toml::Value::from(listen.unwrap_or_else(usual_address).to_string())),
        ("database".to_owned(), format!("sqlite:{}", folder.join("forebay.db").display()).into()),
        ("sessions".to_owned(), toml::toml! { listen = "127.0.0.1:0" audit = 0.0 }.into()),
        (
            "console".to_owned(),
            toml::Value::try_from(BTreeMap::from([("tokenizers", BTreeMap::from([("*", tokenizer)]))]))?,
        ),
        ("upstream".to_owned(), vec![upstream(SOLVER), upstream(CHECKER)].into()),
    ]))?;
    Ok(Config::parse(&text)?)
}

/// The address that documents name, or a free port if something listens there.
fn usual_address() -> SocketAddr {
    let usual = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080));
    if std::net::TcpListener::bind(usual).is_ok() { usual } else { SocketAddr::from((Ipv4Addr::LOCALHOST, 0)) }
}

/// Plays and learns until the time is over, and says how it went.
async fn play(
    args: &DemoArgs,
    folder: &Path,
    engine: &Engine,
    port_file: &Path,
    signals: &mut [Signal; 3],
) -> anyhow::Result<()> {
    let address = loop {
        match std::fs::read_to_string(port_file) {
            Ok(address) => break address,
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    };
    let url = format!("http://{}", address.trim());
    let client = Client::new(&url)?;
    let rules = rules(args.think_ms);
    for policy in [SOLVER, CHECKER] {
        client.put_policy(policy, &rules).await.context("the rules cannot be set")?;
    }
    let learner = |policy: &'static str, answers| Learner {
        client: client.clone(),
        engine: engine.clone(),
        policy,
        table: Table::new(answers),
        file: folder.join(format!("{policy}.json")),
        compute: Duration::from_millis(3 * args.think_ms),
        progress: Arc::default(),
    };
    let run = Run {
        client: client.clone(),
        solver: learner(SOLVER, DIGITS),
        checker: learner(CHECKER, VERDICTS),
        scores: Arc::default(),
        straggle: Duration::from_secs(rules.group.timeout_s + 2),
        shift: Arc::default(),
        started: Instant::now(),
    };
    let end = if args.serve { "until Ctrl-C".to_owned() } else { format!("for {} s", args.seconds) };
    if args.listen.is_none() && !url.ends_with(":8080") {
        say("Something listens on port 8080 already, so this is another port.")?;
    }
    say(&format!(
        "The page is {url}/ - open it now.\n\nEight agents play rollouts {end}: a solver answers a sum, a checker says whether \
         it is right.\nTwo learners train both policies, which are tables, from batches of {} groups with {GROUP_SIZE} rollouts.\n",
        rules.batch.groups,
    ))?;
    tokio::select! {
        outcome = run.play(args.steps) => outcome?,
        outcome = run.tell() => outcome?,
        outcome = run.shift(), if args.serve => outcome?,
        () = sleep(Duration::from_secs(args.seconds)), if !args.serve => {}
        () = any(signals) => {}
    }
    tokio::select! {
        outcome = timeout(SUM_TIMEOUT, run.sum_up()) => outcome.context("the service does not answer")?,
        () = any(signals) => Ok(()),
    }
}

/// Completes with any of the signals.
async fn any(signals: &mut [Signal; 3]) {
    let [interrupt, terminate, hangup] = signals;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
}

/// The rules of both policies: groups whose rollouts are all right or all wrong teach nothing and are discarded.
fn rules(think_ms: u64) -> PolicyRules {
    PolicyRules {
        group: GroupRules {
            size: GROUP_SIZE,
            min_size: Some(GROUP_SIZE / 2),
            // A rollout has three calls, some of which take much longer than others. Only stragglers are late.
            timeout_s: 3 + think_ms / 60,
            ..GroupRules::default()
        },
        batch: BatchRules { groups: 2, ..BatchRules::default() },
        staleness: StalenessRules { max: Some(8), ..StalenessRules::default() },
        // Late and dropped rollouts can be read on the page. Rows of the ledger are kept as long, because a demo may run
        // for days.
        retention: RetentionRules { dropped_s: 3_600, tombstone_s: 3_600, ..RetentionRules::default() },
        filter: vec![FilterRule {
            name: "zero-variance".to_owned(),
            scope: FilterScope::Group,
            when: "reward_std < 1e-6".to_owned(),
            action: FilterAction::Drop,
        }],
        ..PolicyRules::default()
    }
}

fn say(text: &str) -> anyhow::Result<()> {
    Ok(writeln!(stdout(), "{text}")?)
}

/// Agents and learners.
struct Run {
    client: Client,
    solver: Learner,
    checker: Learner,
    scores: Arc<Mutex<Scores>>,
    straggle: Duration,
    shift: Arc<AtomicU32>,
    started: Instant,
}

impl Run {
    /// Plays and learns until the solver has learned `steps` or something fails.
    async fn play(&self, steps: Option<i64>) -> anyhow::Result<()> {
        install_tls_provider();
        let http = reqwest::Client::builder().no_proxy().build()?;
        let agents = (0..AGENTS).map(|number| {
            let (client, http, scores) = (self.client.clone(), http.clone(), Arc::clone(&self.scores));
            let shift = Arc::clone(&self.shift);
            Agent { name: format!("agent{number}"), client, http, scores, straggle: self.straggle, shift }.work()
        });
        tokio::select! {
            outcome = futures::future::try_join_all(agents) => outcome.map(drop),
            outcome = self.checker.run(None) => outcome,
            outcome = self.learn_with_a_restart(steps) => outcome,
        }
    }

    /// The learner of the solver is killed once, and started again from its checkpoint.
    async fn learn_with_a_restart(&self, steps: Option<i64>) -> anyhow::Result<()> {
        self.solver.run(Some(KILLED_AFTER)).await?;
        self.line(&format!(
            "the solver's learner is killed after step {KILLED_AFTER}: what it learned since its last checkpoint is lost"
        ))?;
        let saved = self.solver.saved_step()?;
        self.line(&format!(
            "it starts again from step {saved}: steps {} to {KILLED_AFTER} get the same batches once more",
            saved + 1
        ))?;
        self.solver.run(steps).await
    }

    /// Changes the task from time to time.
    async fn shift(&self) -> anyhow::Result<()> {
        loop {
            sleep(SHIFT_EVERY).await;
            let shift = self.shift.fetch_add(1, Ordering::Relaxed) + 1;
            self.line(&format!(
                "the task changes: the right answer to 1 + 1 is now {}",
                (2 + shift) % DIGITS.len() as u32
            ))?;
        }
    }

    /// Says every few seconds how it goes.
    async fn tell(&self) -> anyhow::Result<()> {
        loop {
            sleep(LINE_EVERY).await;
            let stats = self.client.stats().await.context("the totals cannot be read")?;
            let all: Vec<&PolicyStats> = stats.policies.values().collect();
            self.line(&format!(
                "{}   {} rollouts received, {} late; {} groups discarded",
                self.standing(),
                all.iter().map(|policy| policy.received).sum::<i64>(),
                all.iter().filter_map(|policy| policy.rollouts.get("late")).sum::<i64>(),
                all.iter().filter_map(|policy| policy.groups.get("discarded")).sum::<i64>(),
            ))?;
        }
    }

    /// How far the policies are, and how often they are right.
    fn standing(&self) -> String {
        let scores = *self.scores.lock().unwrap_or_else(PoisonError::into_inner);
        let one = |learner: &Learner, score: f64| {
            format!("{}: step {:>2}, {:>3.0}% right", learner.policy, of(learner).step, 100.0 * score)
        };
        format!("{}   {}", one(&self.solver, scores.solver), one(&self.checker, scores.checker))
    }

    fn line(&self, text: &str) -> anyhow::Result<()> {
        let seconds = self.started.elapsed().as_secs();
        say(&format!("{:02}:{:02}  {text}", seconds / 60, seconds % 60))
    }

    /// What was reached, and what to do next.
    async fn sum_up(&self) -> anyhow::Result<()> {
        let stats = self.client.stats().await.context("the totals cannot be read")?;
        say(&format!("\n{}", self.standing()))?;
        for learner in [&self.solver, &self.checker] {
            let progress = of(learner);
            let which = if progress.step > REMEMBERED_STEPS {
                format!("none of the last {REMEMBERED_STEPS} steps")
            } else {
                "none of them".to_owned()
            };
            say(&format!(
                "The {} was trained for {} steps from {} rollouts, and from {which} twice.",
                learner.policy, progress.step, progress.trained
            ))?;
        }
        let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
        for (state, count) in stats.policies.values().flat_map(|policy| &policy.rollouts) {
            *counts.entry(state).or_default() += count;
        }
        let counts = counts.iter().filter(|(_, count)| **count > 0);
        let counts: Vec<String> = counts.map(|(state, count)| format!("{count} {state}")).collect();
        let received: i64 = stats.policies.values().map(|policy| policy.received).sum();
        let sum = if stats.conserved { "They add up" } else { "They do not add up, which is a bug" };
        say(&format!("The service received {received} rollouts: {}. {sum}.", counts.join(", ")))?;
        say("\nNext:\n  forebay demo --serve    the same until Ctrl-C, with time to look at the page\n  \
             forebay serve           a service on 127.0.0.1:8080, with its data in data/forebay.db\n  \
             forebay top             all policies of a service in the terminal\n\n\
             docs/agents.md, docs/connect.md and docs/trainers.md say how your own agents and trainers take part.")
    }
}

fn of(learner: &Learner) -> Progress {
    learner.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
