//! Care for data from the command line: copies of it, and whether it is what it should be.

use std::{
    io::{IsTerminal as _, Write as _},
    path::Path,
};

use anyhow::{Context as _, bail};
use forebay::{
    buffer::doctor::{self, Diagnosis},
    metrics::Metrics,
    store,
};

/// `forebay backup`: the path of the copy on standard output.
pub(crate) async fn backup(database: &str, to: &Path) -> anyhow::Result<()> {
    let bytes = store::backup(database, to).await?;
    eprintln!("{bytes} bytes; check it with: forebay doctor --database sqlite:{}", to.display());
    crate::print(&format!("{}\n", to.display()))
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
