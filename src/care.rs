//! Care for data from the command line: copies of it, and whether it is what it should be.

use std::{
    io::{IsTerminal as _, Write as _},
    path::Path,
};

use anyhow::{Context as _, bail};
use forebay::{
    buffer::doctor::{self, Diagnosis},
    clock::{AnchoredClock, Clock as _},
    metrics::Metrics,
    store,
};

/// `forebay backup`: the path of the copy on standard output.
pub(crate) fn backup(database: &str, to: &Path) -> anyhow::Result<()> {
    let bytes = store::backup(database, to)?;
    let to = to.display();
    eprintln!("{bytes} bytes; check it with: forebay doctor --database sqlite:{to}; use it with: forebay restore {to}");
    crate::print(&format!("{to}\n"))
}

/// `forebay restore`: the path of the database on standard output.
pub(crate) async fn restore(database: &str, copy: &Path) -> anyhow::Result<()> {
    eprintln!("checking {} and copying it beside the database", copy.display());
    let now = AnchoredClock::new().now();
    let restored = store::restore(database, copy, now, Metrics::new().store()).await?;
    eprintln!(
        "restored {}: all of its {} policies have begun a new epoch, so trainers that are alive are refused until they \
         resume",
        copy.display(),
        restored.policies
    );
    if let Some(replaced) = restored.replaced {
        eprintln!(
            "what was there before is kept as {0} (and {0}-wal): remove it when it is not needed",
            replaced.display()
        );
    }
    crate::print(&format!("{}\n", restored.database.display()))
}

/// `forebay doctor`: a table on standard output, an error when something is wrong.
pub(crate) async fn doctor(database: &str) -> anyhow::Result<()> {
    // An empty database is always healthy: one that is not there must not be made.
    let store = store::open_existing(database, Metrics::new().store()).await?;
    let shows_progress = std::io::stderr().is_terminal();
    let progress = |rollouts: u64| {
        if shows_progress {
            eprint!("\r{rollouts} rollouts read");
            let _ = std::io::stderr().flush();
        }
    };
    let diagnosis = doctor::examine(&*store, progress).await.context("the database cannot be read")?;
    store.close().await;
    if shows_progress {
        eprintln!();
    }
    crate::print(&table(&diagnosis))?;
    if !diagnosis.is_healthy() {
        bail!("the database is damaged: see above");
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
