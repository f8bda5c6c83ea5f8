//! `forebay backup`, `restore` and `doctor`: copies of a database, and its diagnosis.

use std::{
    io::{IsTerminal as _, Write as _},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use forebay_domain::{
    clock::{AnchoredClock, Clock as _},
    health::Health,
    sweep::PayloadMoves,
};
use forebay_service::looking::doctor::{self, Diagnosis};
use forebay_store::{self as store, ObjectsClaim, OpenError, PayloadKind, PayloadOptions, Store, error::StoreError};
use forebay_telemetry::metrics::Metrics;

/// How often the number of payloads that are left is printed.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// `forebay backup`: makes a copy and prints its path to standard output.
pub(crate) fn backup(database: &str, to: &Path, previous: Option<&Path>) -> anyhow::Result<()> {
    let bytes = store::backup(database, to, previous)?;
    let to = to.display();
    eprintln!("{bytes} bytes; check it with: forebay doctor --database sqlite:{to}; use it with: forebay restore {to}");
    crate::print(&format!("{to}\n"))
}

/// `forebay restore`: replaces the database and prints its path to standard output.
pub(crate) async fn restore(database: &str, copy: &Path) -> anyhow::Result<()> {
    eprintln!("checking {} and copying it beside the database", copy.display());
    let now = AnchoredClock::new().now();
    let restored = store::restore(database, copy, now, Metrics::new().store()).await?;
    eprintln!(
        "restored {}: all of its {} policies have begun a new epoch, so running trainers are refused until they \
         resume",
        copy.display(),
        restored.policies
    );
    if let Some(replaced) = restored.replaced {
        eprintln!(
            "the previous database is kept as {0} (and {0}-wal): delete it when you no longer need it",
            replaced.display()
        );
    }
    crate::print(&format!("{}\n", restored.database.display()))
}

/// `forebay move-payloads`: moves all payloads and says how many are where.
pub(crate) async fn move_payloads(
    database: &str,
    kind: PayloadKind,
    objects_url: Option<String>,
) -> anyhow::Result<()> {
    let objects_claim = ObjectsClaim::Require;
    let options = PayloadOptions { kind: Some(kind), objects_url, objects_claim, ..PayloadOptions::default() };
    let store = store::open_existing_with(database, options, Metrics::new().store()).await?;
    let shows_progress = std::io::stderr().is_terminal();
    let health = store.health();
    let places = loop {
        let moves = move_for_a_while(&store).await.context("the payloads cannot be moved")?;
        let places = store.count_payloads().await.context("the database cannot be read")?;
        let left = match kind {
            PayloadKind::Database => places.in_files,
            PayloadKind::Segments | PayloadKind::Objects => places.in_database,
        };
        if shows_progress {
            eprint!("\r{left} payloads are left ");
            let _ = std::io::stderr().flush();
        }
        if *health.borrow() != Health::Writable {
            bail!("the database cannot be written; {left} payloads are not moved");
        }
        if moves == PayloadMoves::Done {
            if left > 0 {
                bail!("payloads cannot be read and stay where they are: {left}; `forebay doctor` names them");
            }
            break places;
        }
    };
    store.close().await;
    if shows_progress {
        eprintln!();
    }
    crate::print(&format!("{} in the database, {} outside of it\n", places.in_database, places.in_files))
}

/// Moves payloads until progress is to be printed.
async fn move_for_a_while(store: &Store) -> Result<PayloadMoves, StoreError> {
    let clock = AnchoredClock::new();
    let until = Instant::now() + PROGRESS_INTERVAL;
    loop {
        match store.look_after_payloads(clock.now()).await? {
            PayloadMoves::More if Instant::now() < until => {}
            PayloadMoves::InBackground => {
                tokio::time::sleep_until(until.into()).await;
                return Ok(PayloadMoves::InBackground);
            }
            moves => return Ok(moves),
        }
    }
}

/// `forebay doctor`: prints a table to standard output, and fails if anything is wrong.
pub(crate) async fn doctor(database: &str) -> anyhow::Result<()> {
    // A missing database must not be created, because a new, empty one would always be healthy.
    let store = match store::open_existing(database, Metrics::new().store()).await {
        // Nothing can be stored without these files. They are examined all the same, because the error names only one.
        Err(OpenError::Payloads { .. }) => store::open_reading(database, Metrics::new().store()).await?,
        opened => opened?,
    };
    let shows_progress = std::io::stderr().is_terminal();
    let progress = |rollouts: u64| {
        if shows_progress {
            eprint!("\r{rollouts} rollouts read");
            let _ = std::io::stderr().flush();
        }
    };
    let diagnosis = doctor::examine(&store, progress).await.context("the database cannot be read")?;
    store.close().await;
    if shows_progress {
        eprintln!();
    }
    crate::print(&table(&diagnosis))?;
    if !diagnosis.is_healthy() {
        bail!("the database is damaged: the problems are listed above");
    }
    Ok(())
}

fn table(diagnosis: &Diagnosis) -> String {
    let mut lines = Vec::new();
    for part in &diagnosis.parts {
        let verdict = if part.findings.is_empty() { "ok" } else { "BAD" };
        lines.push(format!("{:<10} {verdict:<4} {}\n", part.name, part.extent));
        lines.extend(part.findings.iter().map(|finding| format!("           - {finding}\n")));
    }
    lines.concat()
}
