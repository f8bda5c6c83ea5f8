//! `forebay demo`: agents, an engine and trainers that need nothing but this program, against a service of their own.

mod engine;
mod learner;
mod table;
mod team;

use std::{
    collections::BTreeMap,
    io::{Write as _, stdout},
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Args;
use forebay_client::{
    Client, install_tls_provider,
    wire::{
        BatchRules, FilterAction, FilterRule, FilterScope, GroupRules, PolicyRules, PolicyStats, RetentionRules,
        StalenessRules,
    },
};
use tokio::{
    net::TcpListener,
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
    time::{Instant, sleep},
};

use self::{
    engine::Engine,
    learner::{Learner, Progress},
    table::{DIGITS, Table, VERDICTS},
    team::{Agent, CHECKER, GROUP_SIZE, GROUP_TIMEOUT_S, SOLVER, Scores},
};

/// Agents, each of which plays a group at a time.
const AGENTS: u32 = 8;

/// The step of the solver after which its learner is killed. The last checkpoint is three steps older.
const KILLED_AFTER: i64 = 13;

/// How often a line says how it goes.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// How long the service may take to start.
const START_TIMEOUT: Duration = Duration::from_mins(1);

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
    #[arg(long, value_name = "N", conflicts_with = "serve")]
    steps: Option<i64>,
    /// How long the engine takes for an answer, on average
    #[arg(long, value_name = "MS", default_value_t = 300)]
    think_ms: u64,
    /// Address of the service and its page [default: 127.0.0.1:8080, or a free port if something listens there]
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
}

/// Serves, plays and learns until the time is over.
#[tokio::main]
pub(crate) async fn demo(args: &DemoArgs) -> anyhow::Result<()> {
    let folder = tempfile::Builder::new().prefix("forebay-demo-").tempdir().context("no temporary folder")?;
    let engine = Engine::new(Duration::from_millis(args.think_ms));
    engine.load(SOLVER, Table::new(DIGITS));
    engine.load(CHECKER, Table::new(VERDICTS));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("the engine cannot listen")?;
    let engine_address = listener.local_addr()?;
    tokio::spawn(engine.clone().serve(listener));
    let mut service = Service::start(folder.path(), args.listen, engine_address).await?;
    let client = Client::new(&service.url)?;
    for policy in [SOLVER, CHECKER] {
        client.put_policy(policy, &rules()).await.context("the rules cannot be set")?;
    }
    let learner = |policy: &'static str, answers| Learner {
        client: client.clone(),
        engine: engine.clone(),
        policy,
        table: Table::new(answers),
        file: folder.path().join(format!("{policy}.json")),
        progress: Arc::default(),
    };
    let run = Run {
        client: client.clone(),
        solver: learner(SOLVER, DIGITS),
        checker: learner(CHECKER, VERDICTS),
        scores: Arc::default(),
        started: Instant::now(),
    };
    let end = if args.serve { "until Ctrl-C".to_owned() } else { format!("for {} s", args.seconds) };
    say(&format!(
        "The page is {}/ - open it now.\n\nEight agents play rollouts {end}: a solver answers a sum, a checker says whether \
         it is right.\nTwo learners train both policies, which are tables, from batches of {} groups with {GROUP_SIZE} rollouts.\n",
        service.url,
        rules().batch.groups,
    ))?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        outcome = run.play() => outcome?,
        outcome = run.tell(args.steps) => outcome?,
        () = sleep(Duration::from_secs(args.seconds)), if !args.serve => {}
        outcome = tokio::signal::ctrl_c() => outcome?,
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
        outcome = service.process.wait() => bail!("the service ended ({}):\n{}", outcome?, service_log(folder.path())),
    }
    run.sum_up().await
}

/// The rules of both policies: groups whose rollouts are all right or all wrong teach nothing and are discarded.
fn rules() -> PolicyRules {
    PolicyRules {
        group: GroupRules {
            size: GROUP_SIZE,
            min_size: Some(GROUP_SIZE / 2),
            timeout_s: GROUP_TIMEOUT_S,
            ..GroupRules::default()
        },
        batch: BatchRules { groups: 2, ..BatchRules::default() },
        staleness: StalenessRules { max: Some(8), ..StalenessRules::default() },
        // Late and dropped rollouts can be read on the page.
        retention: RetentionRules { dropped_s: 3_600, ..RetentionRules::default() },
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

/// This program's service, on a database that is deleted at the end. Dropping it kills it.
struct Service {
    process: Child,
    url: String,
}

impl Service {
    async fn start(folder: &Path, listen: Option<SocketAddr>, engine: SocketAddr) -> anyhow::Result<Self> {
        let listen = listen.unwrap_or_else(|| {
            let usual = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080));
            if std::net::TcpListener::bind(usual).is_ok() { usual } else { SocketAddr::from((Ipv4Addr::LOCALHOST, 0)) }
        });
        let tokenizer = folder.join("tokenizer.json");
        std::fs::write(&tokenizer, table::tokenizer().to_string())?;
        let upstream = |policy: &str| {
            BTreeMap::from([
                ("name", toml::Value::from(policy)),
                ("kind", "openai".into()),
                ("urls", vec![format!("http://{engine}")].into()),
                ("policies", vec![policy].into()),
            ])
        };
        let config = toml::to_string(&BTreeMap::from([
            (
                "sessions",
                toml::Value::try_from(BTreeMap::from([
                    ("listen", "127.0.0.1:0".into()),
                    ("audit", toml::Value::from(0.0)),
                ]))?,
            ),
            ("console", toml::Value::try_from(BTreeMap::from([("tokenizers", BTreeMap::from([("*", tokenizer)]))]))?),
            ("upstream", toml::Value::try_from([upstream(SOLVER), upstream(CHECKER)])?),
        ]))?;
        std::fs::write(folder.join("forebay.toml"), config)?;
        let log = std::fs::File::create(folder.join("service.log"))?;
        let port_file = folder.join("port");
        let mut process = Command::new(std::env::current_exe().context("this program has no path")?)
            .arg("serve")
            .args(["--listen", &listen.to_string()])
            .args(["--database", &format!("sqlite:{}", folder.join("forebay.db").display())])
            .arg("--config")
            .arg(folder.join("forebay.toml"))
            .arg("--port-file")
            .arg(&port_file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            // Ctrl-C ends the demo, which then ends the service.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("the service cannot be started")?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Ok(address) = std::fs::read_to_string(&port_file) {
                return Ok(Self { process, url: format!("http://{}", address.trim()) });
            }
            if let Some(status) = process.try_wait()? {
                bail!("the service ended ({status}):\n{}", service_log(folder));
            }
            if Instant::now() > deadline {
                bail!("the service did not start in {} s:\n{}", START_TIMEOUT.as_secs(), service_log(folder));
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The last lines of the service's log.
fn service_log(folder: &Path) -> String {
    let log = std::fs::read_to_string(folder.join("service.log")).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Agents and learners.
struct Run {
    client: Client,
    solver: Learner,
    checker: Learner,
    scores: Arc<Mutex<Scores>>,
    started: Instant,
}

impl Run {
    /// Plays and learns until something fails.
    async fn play(&self) -> anyhow::Result<()> {
        install_tls_provider();
        let http = reqwest::Client::new();
        let agents = (0..AGENTS).map(|number| {
            let (client, http, scores) = (self.client.clone(), http.clone(), Arc::clone(&self.scores));
            Agent { name: format!("agent{number}"), client, http, scores }.work()
        });
        tokio::try_join!(futures::future::try_join_all(agents), self.learn_with_a_restart(), self.checker.run(None))?;
        Ok(())
    }

    /// The learner of the solver is killed once, and started again from its checkpoint.
    async fn learn_with_a_restart(&self) -> anyhow::Result<()> {
        self.solver.run(Some(KILLED_AFTER)).await?;
        self.line(&format!(
            "the solver's learner is killed after step {KILLED_AFTER}, with what it learned since its last checkpoint"
        ))?;
        let saved = self.solver.saved_step()?;
        self.line(&format!(
            "it starts again from step {saved}: steps {} to {KILLED_AFTER} get the same batches once more",
            saved + 1
        ))?;
        self.solver.run(None).await
    }

    /// Says every few seconds how it goes, until the solver has learned `steps`.
    async fn tell(&self, steps: Option<i64>) -> anyhow::Result<()> {
        let mut told = Instant::now();
        while steps.is_none_or(|steps| of(&self.solver).step < steps) {
            sleep(Duration::from_millis(100)).await;
            if told.elapsed() >= LINE_EVERY {
                told = Instant::now();
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
        Ok(())
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
            say(&format!(
                "The {} was trained for {} steps from {} rollouts, and from none of them twice.",
                learner.policy, progress.step, progress.trained
            ))?;
        }
        let received: i64 = stats.policies.values().map(|policy| policy.received).sum();
        let sum = if stats.conserved {
            "every one is accounted for"
        } else {
            "but the ledger does not account for all of them"
        };
        say(&format!("The service received {received} rollouts, and {sum}."))?;
        say("\nNext:\n  forebay demo --serve    the same until Ctrl-C, with time to look at the page\n  \
             forebay serve           a service on 127.0.0.1:8080, with its data in data/forebay.db\n  \
             forebay top             all policies of a service in the terminal")
    }
}

fn of(learner: &Learner) -> Progress {
    learner.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
