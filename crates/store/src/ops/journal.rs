//! The journal of policies: what operators and time did, written by the transactions that do it.
use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{CallerId, PolicyPk},
    looking::journal::{Happening, JournalEntry, Notice, ReadJournal},
    pages::{Cursor, Order, Page},
};

use super::policy;
use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, args},
};

/// The entries of a policy that are kept: months of an ordinary policy, and hours of one whose leases expire all the time.
const ENTRIES_MAX: i64 = 2_000;

/// The newest entries in which a notice is looked for, so that replicas do not repeat each other.
const LOOKED_AT: i64 = 100;

/// Writes an entry, and deletes the oldest one beyond the bound.
pub(super) async fn write(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    happening: &Happening,
    by: Option<&CallerId>,
    at: Timestamp,
) -> Result<(), StoreError> {
    const INSERT_ENTRY: Statement = Statement::new(
        "-- insert_entry
        INSERT INTO journal (policy_pk, at_us, kind, key_id, body)
        VALUES ($1, $2, $3, $4, $5)",
    );
    const DELETE_ENTRIES: Statement = Statement::new(
        "-- delete_entries
        DELETE FROM journal
        WHERE policy_pk = $1
            AND journal_pk <= (
                SELECT journal_pk FROM journal WHERE policy_pk = $1 ORDER BY journal_pk DESC LIMIT 1 OFFSET $2
            )",
    );
    let values = args![policy, at, happening.kind(), by.map(CallerId::as_str), happening.detail().to_string()];
    tx.guarded(INSERT_ENTRY, values, 1).await?;
    tx.execute(DELETE_ENTRIES, args![policy, ENTRIES_MAX]).await.map(drop)
}

#[async_trait]
impl Op for ReadJournal {
    type Output = Page<JournalEntry>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_OLDEST_ENTRIES: Statement = Statement::new(
            "-- select_oldest_entries
            SELECT journal_pk, at_us, kind, key_id, body
            FROM journal
            WHERE policy_pk = $1 AND journal_pk > $2
            ORDER BY journal_pk
            LIMIT $3",
        );
        const SELECT_NEWEST_ENTRIES: Statement = Statement::new(
            "-- select_newest_entries
            SELECT journal_pk, at_us, kind, key_id, body
            FROM journal
            WHERE policy_pk = $1 AND journal_pk < $2
            ORDER BY journal_pk DESC
            LIMIT $3",
        );
        let (Cursor::After(key) | Cursor::Before(key)) = self.from;
        let statement = match self.from.order() {
            Order::Oldest => SELECT_OLDEST_ENTRIES,
            Order::Newest => SELECT_NEWEST_ENTRIES,
        };
        let rows = tx.fetch_all(statement, args![self.policy, key, self.limit]).await?;
        let examined = rows.len() as u32;
        let mut last = None;
        let mut entries = Vec::with_capacity(rows.len());
        for mut row in rows {
            last = Some(row.get("journal_pk")?);
            entries.push(entry(row)?);
        }
        let next = last.filter(|_| examined == self.limit).map(|last| self.from.behind(last));
        Ok(Page { entries, next, examined })
    }
}

fn entry(mut row: Row) -> Result<JournalEntry, StoreError> {
    let body: String = row.get("body")?;
    let detail = serde_json::from_str(&body);
    Ok(JournalEntry {
        at: row.get("at_us")?,
        kind: row.get("kind")?,
        key_id: row.get::<Option<String>>("key_id")?.map(|key_id| CallerId::new(&key_id)),
        detail: detail.map_err(|error| StoreError::Corrupt(format!("column `body` of the journal: {error}")))?,
    })
}

/// Writes what a process noticed, unless the journal has it.
pub struct WriteNotices(pub Vec<Notice>);

#[async_trait]
impl Op for WriteNotices {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        for Notice { policy, happening, at } in &self.0 {
            // The lock keeps two replicas from writing the same.
            let Some(policy) = policy::lock(tx, policy).await? else { continue };
            if is_news(tx, policy.policy_pk, happening).await? {
                write(tx, policy.policy_pk, happening, None, *at).await?;
            }
        }
        Ok(())
    }
}

/// Whether the newest entries do not say the same.
async fn is_news(tx: &mut Tx<'_>, policy: PolicyPk, happening: &Happening) -> Result<bool, StoreError> {
    let read = ReadJournal { policy, from: Cursor::first(Order::Newest), limit: LOOKED_AT as u32 };
    let newest = read.run(tx).await?.entries;
    let kinds: &[&str] = match happening {
        Happening::BacklogFull | Happening::BacklogFreed => &["backlog-full", "backlog-freed"],
        // With other rules, a filter of the same name may fail anew.
        Happening::FilterFails(_) => &["filter-fails", "rules-changed"],
        _ => return Ok(true),
    };
    let detail = happening.detail();
    let is_about = |entry: &&JournalEntry| {
        kinds.contains(&entry.kind.as_str()) && (entry.kind != "filter-fails" || entry.detail == detail)
    };
    let last = newest.iter().find(is_about).map(|entry| entry.kind.as_str());
    Ok(match happening {
        Happening::BacklogFreed => last == Some("backlog-full"),
        _ => last != Some(happening.kind()),
    })
}
