//! Blobs: what is uploaded once and named by rollouts. Their bytes are payloads, so they are where payloads are, move,
//! are copied and come back with them.
//!
//! An upload expires unless a rollout names it. Ingest locks what it names against the sweep that deletes it, and a purge
//! gives it back. Whoever finds that nobody names a blob has its row locked, and looks after that.

use async_trait::async_trait;
use bytes::Bytes;
use forebay_domain::{
    blobs::{self, Blob, KEPT_UNUSED_S, PIECE_BYTES, PIECES_MAX},
    clock::Timestamp,
    formats::payload::Payload,
    ids::{BatchPk, BlobDigest, RolloutPk},
    rules::Rules,
};
use forebay_wire::ColumnRetention;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{
    batch,
    places::{count_released, read_place},
};
use crate::{
    error::StoreError,
    op::{Class, Op},
    segment_files::Place,
    sql::{InsertRows, Row, Statement, Tx, among_keys, args, key_list, locking},
};

/// The key of a blob's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlobPk(i64);

impl BlobPk {
    pub(super) fn as_i64(self) -> i64 {
        self.0
    }

    /// The key of a piece in the table of payloads. Those of rollouts are above zero.
    #[must_use]
    pub fn piece(self, index: u64) -> RolloutPk {
        debug_assert!(index < PIECES_MAX, "a blob has fewer pieces");
        RolloutPk(-(self.0 * PIECES_MAX as i64) - index as i64)
    }
}

pub(super) static INSERT_PAYLOADS: InsertRows =
    InsertRows::new("insert_payloads", "payload", "rollout_pk, codec, digest, body, file, start, length");

/// The row of a payload, which is stored where the transaction stores payloads.
pub(super) fn payload_row(tx: &mut Tx<'_>, key: RolloutPk, payload: &Payload) -> Vec<crate::sql::Arg> {
    let place = tx.place_payload(key, payload);
    let body = if place.is_some() { Bytes::new() } else { payload.body.clone() };
    let [file, start, length] = Place::columns(place);
    args![key, payload.codec, &payload.digest[..], body, file, start, length]
}

pub(super) fn read_blob(row: &mut Row) -> Result<(BlobPk, Blob), StoreError> {
    let blob = Blob {
        digest: BlobDigest(row.get("digest")?),
        bytes: row.get("bytes")?,
        stored: row.get("stored")?,
        media_type: row.get("media_type")?,
        expires_at: row.get("expires_us")?,
    };
    Ok((BlobPk(row.get("blob_pk")?), blob))
}

/// A blob that is stored whole.
pub struct FindBlob(pub BlobDigest);

#[async_trait]
impl Op for FindBlob {
    type Output = Option<(BlobPk, Blob)>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const FIND_BLOB: Statement = Statement::new(
            "-- find_blob
            SELECT blob_pk, digest, bytes, stored, media_type, expires_us
            FROM blob
            WHERE digest = $1 AND stored = bytes",
        );
        let row = tx.fetch_optional(FIND_BLOB, args![&self.0.0[..]]).await?;
        row.map(|mut row| read_blob(&mut row)).transpose()
    }
}

/// Those of some blobs that are stored whole.
pub struct FindBlobs(pub BTreeSet<BlobDigest>);

#[async_trait]
impl Op for FindBlobs {
    type Output = HashMap<BlobDigest, (BlobPk, Blob)>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const FIND_BLOBS: Statement = Statement {
            sqlite: "-- find_blobs
                SELECT blob_pk, digest, bytes, stored, media_type, expires_us
                FROM blob
                WHERE digest IN (SELECT UNHEX(value) FROM json_each($1)) AND stored = bytes",
            postgres: "-- find_blobs
                SELECT blob_pk, digest, bytes, stored, media_type, expires_us
                FROM blob
                WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM json_array_elements_text($1::json)))
                    AND stored = bytes",
        };
        let rows = tx.fetch_all(FIND_BLOBS, args![digest_list(&self.0)]).await?;
        let found = rows.into_iter().map(|mut row| read_blob(&mut row).map(|(key, blob)| (blob.digest, (key, blob))));
        found.collect()
    }
}

fn digest_list(digests: &BTreeSet<BlobDigest>) -> String {
    let digests: Vec<String> = digests.iter().map(BlobDigest::to_string).collect();
    serde_json::to_string(&digests).expect("a list of texts always serializes")
}

/// Keeps blobs that are stored whole for as long as new uploads. Returns each of them, or else what is stored of one with so
/// many bytes. They are in the order of their digests, as all who lock several.
pub struct KeepBlobs {
    pub uploads: BTreeMap<BlobDigest, u64>,
    pub now: Timestamp,
}

#[async_trait]
impl Op for KeepBlobs {
    type Output = BTreeMap<BlobDigest, Blob>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const KEEP_BLOB: Statement = Statement::new(
            "-- keep_blob
            UPDATE blob
            SET kept_until_us = $2, expires_us = CASE WHEN expires_us IS NOT NULL THEN CAST($2 AS BIGINT) END
            WHERE digest = $1 AND stored = bytes
            RETURNING blob_pk, digest, bytes, stored, media_type, expires_us",
        );
        const FIND_UPLOAD: Statement = Statement::new(
            "-- find_upload
            SELECT blob_pk, digest, bytes, stored, media_type, expires_us
            FROM blob
            WHERE digest = $1 AND bytes = $2",
        );
        let kept_until = self.now.plus_seconds(KEPT_UNUSED_S);
        let mut found = BTreeMap::new();
        for (digest, &bytes) in &self.uploads {
            let row = match tx.fetch_optional(KEEP_BLOB, args![&digest.0[..], kept_until]).await? {
                None => tx.fetch_optional(FIND_UPLOAD, args![&digest.0[..], bytes]).await?,
                kept => kept,
            };
            if let Some(mut row) = row {
                found.insert(*digest, read_blob(&mut row)?.1);
            }
        }
        Ok(found)
    }
}

/// How many blobs no rollout has ever named, and how many bytes of them are stored. At most so many are counted.
pub struct SumNeverNamed(pub u64);

#[async_trait]
impl Op for SumNeverNamed {
    type Output = (u64, u64);

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(u64, u64), StoreError> {
        const SUM_NEVER_NAMED: Statement = Statement::new(
            "-- sum_never_named
            SELECT COUNT(*) AS blobs, CAST(COALESCE(SUM(stored), 0) AS BIGINT) AS bytes
            FROM (SELECT stored FROM blob WHERE was_named = 0 LIMIT $1) AS never_named",
        );
        let mut row = tx.fetch_one(SUM_NEVER_NAMED, args![self.0]).await?;
        Ok((row.get("blobs")?, row.get("bytes")?))
    }
}

/// Stores the next pieces of a blob. If another upload has stored others meanwhile, these are left out.
pub struct StorePieces {
    pub digest: BlobDigest,
    /// Bytes of the whole.
    pub bytes: u64,
    pub media_type: Option<String>,
    /// The index of the first piece.
    pub first: u64,
    pub pieces: Vec<Payload>,
    pub now: Timestamp,
}

/// What became of pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// So many bytes are stored from the beginning: all of them if these were the last.
    UpTo(u64),
    /// All pieces are there, and they are not what the digest says. They were deleted.
    Differs,
}

#[async_trait]
impl Op for StorePieces {
    type Output = Stored;

    const CLASS: Class = Class::Bulk;

    fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.body.len()).sum()
    }

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Stored, StoreError> {
        const NOTE_STORED: Statement = Statement::new(
            "-- note_stored
            UPDATE blob
            SET stored = $2, media_type = COALESCE($3, media_type), kept_until_us = $4, expires_us = $4
            WHERE blob_pk = $1",
        );
        let (blob_pk, blob) = self.lock_or_insert(tx).await?;
        if blob.is_complete() || blob.stored != self.first * PIECE_BYTES {
            return Ok(Stored::UpTo(blob.stored));
        }
        let stored = blob.stored + self.bytes() as u64;
        // Before these pieces are in the transaction: what it takes into an object cannot leave it any more.
        if stored == self.bytes && self.digest_with(tx, blob_pk).await? != Some(self.digest) {
            delete_blob(tx, blob_pk, self.now).await?;
            return Ok(Stored::Differs);
        }
        let numbered = (self.first..).zip(&self.pieces);
        let rows = numbered.map(|(index, piece)| payload_row(tx, blob_pk.piece(index), piece)).collect();
        INSERT_PAYLOADS.run(tx, rows).await?;
        let kept_until = self.now.plus_seconds(KEPT_UNUSED_S);
        tx.guarded(NOTE_STORED, args![blob_pk.0, stored, self.media_type.as_deref(), kept_until], 1).await?;
        Ok(Stored::UpTo(stored))
    }
}

impl StorePieces {
    /// The row of the blob.
    async fn lock_or_insert(&self, tx: &mut Tx<'_>) -> Result<(BlobPk, Blob), StoreError> {
        const LOCK_BLOB: Statement = locking!(
            "-- lock_blob
            SELECT blob_pk, digest, bytes, stored, media_type, expires_us
            FROM blob
            WHERE digest = $1 AND bytes = $2"
        );
        // If another replica inserts it at the same time, the unique index makes one of both transactions run again.
        const INSERT_BLOB: Statement = Statement::new(
            "-- insert_blob
            INSERT INTO blob (digest, bytes, stored, kept_until_us, expires_us)
            VALUES ($1, $2, 0, $3, $3)
            RETURNING blob_pk, digest, bytes, stored, media_type, expires_us",
        );
        if let Some(mut row) = tx.fetch_optional(LOCK_BLOB, args![&self.digest.0[..], self.bytes]).await? {
            return read_blob(&mut row);
        }
        let kept_until = self.now.plus_seconds(KEPT_UNUSED_S);
        let mut row = tx.fetch_one(INSERT_BLOB, args![&self.digest.0[..], self.bytes, kept_until]).await?;
        read_blob(&mut row)
    }

    /// The digest of the pieces that are stored and these.
    async fn digest_with(&self, tx: &mut Tx<'_>, blob: BlobPk) -> Result<Option<BlobDigest>, StoreError> {
        // The first piece has the highest key.
        const SELECT_PIECES: Statement = Statement::new(
            "-- select_pieces
            SELECT digest
            FROM payload
            WHERE rollout_pk BETWEEN $1 AND $2
            ORDER BY rollout_pk DESC",
        );
        let rows = tx.fetch_all(SELECT_PIECES, args![blob.piece(PIECES_MAX - 1), blob.piece(0)]).await?;
        let stored = rows.into_iter().map(|mut row| row.get("digest"));
        let all = stored.chain(self.pieces.iter().map(|piece| Ok(piece.digest)));
        Ok(blobs::digest_of(self.bytes, &all.collect::<Result<Vec<_>, _>>()?))
    }
}

async fn delete_pieces(tx: &mut Tx<'_>, blob: BlobPk, now: Timestamp) -> Result<(), StoreError> {
    const DELETE_PIECES: Statement = Statement::new(
        "-- delete_pieces
        DELETE FROM payload
        WHERE rollout_pk BETWEEN $1 AND $2
        RETURNING file, start, length",
    );
    let mut places = Vec::new();
    for mut row in tx.fetch_all(DELETE_PIECES, args![blob.piece(PIECES_MAX - 1), blob.piece(0)]).await? {
        places.extend(read_place(&mut row)?);
    }
    count_released(tx, &places, now).await
}

async fn delete_blob(tx: &mut Tx<'_>, blob: BlobPk, now: Timestamp) -> Result<(), StoreError> {
    const DELETE_BLOB: Statement = Statement::new("-- delete_blob\nDELETE FROM blob WHERE blob_pk = $1");
    delete_pieces(tx, blob, now).await?;
    tx.guarded(DELETE_BLOB, args![blob.0], 1).await
}

/// Deletes uploads that are due and that no rollout names, up to `limit`. Returns how many were due.
pub struct RetireBlobs {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for RetireBlobs {
    type Output = u64;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<u64, StoreError> {
        // This lock, and no weaker one, waits for posts that name the blob. What they hold now is due later.
        const LOCK_EXPIRED_BLOBS: Statement = Statement {
            sqlite: "-- lock_expired_blobs
                SELECT blob_pk
                FROM blob
                WHERE expires_us <= $1
                ORDER BY expires_us
                LIMIT $2",
            postgres: "-- lock_expired_blobs
                SELECT blob_pk
                FROM blob
                WHERE expires_us <= $1
                ORDER BY expires_us
                LIMIT $2
                FOR UPDATE SKIP LOCKED",
        };
        // A statement of its own: it sees what was committed before the lock was taken.
        const KEEP_IF_NAMED: Statement = Statement::new(
            "-- keep_if_named
            UPDATE blob
            SET expires_us = NULL
            WHERE blob_pk = $1 AND EXISTS (SELECT 1 FROM blob_use AS u WHERE u.blob_pk = $1)",
        );
        let rows = tx.fetch_all(LOCK_EXPIRED_BLOBS, args![self.now, self.limit]).await?;
        let due = rows.len() as u64;
        for mut row in rows {
            let blob_pk = BlobPk(row.get("blob_pk")?);
            if tx.execute(KEEP_IF_NAMED, args![blob_pk.0]).await? == 0 {
                delete_blob(tx, blob_pk, self.now).await?;
            }
        }
        Ok(due)
    }
}

/// A blob that new rollouts name.
#[derive(Clone, Copy, Debug)]
pub(super) struct NamedBlob {
    pub(super) blob_pk: BlobPk,
    pub(super) bytes: u64,
    pub(super) kept: Kept,
    /// Whether it is only named as a column, and not as a medium.
    pub(super) is_column: bool,
}

/// How long a rollout keeps a blob, as the table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kept {
    /// Until a batch with the rollout is acked.
    Ack,
    /// Until the batch is settled.
    Settled,
    /// As long as its payload.
    Rollout,
}

impl Kept {
    fn code(self) -> i64 {
        match self {
            Self::Rollout => 0,
            Self::Ack => 1,
            Self::Settled => 2,
        }
    }
}

impl From<ColumnRetention> for Kept {
    fn from(retention: ColumnRetention) -> Self {
        match retention {
            ColumnRetention::Ack => Self::Ack,
            ColumnRetention::Checkpoint => Self::Settled,
            ColumnRetention::Rollout => Self::Rollout,
        }
    }
}

/// Those of some blobs that are stored whole. They cannot be deleted before the transaction ends.
pub(super) async fn lock_named(
    tx: &mut Tx<'_>,
    named: &BTreeSet<BlobDigest>,
) -> Result<HashMap<BlobDigest, NamedBlob>, StoreError> {
    const LOCK_NAMED: Statement = Statement {
        sqlite: "-- lock_named
            SELECT blob_pk, digest, bytes
            FROM blob
            WHERE digest IN (SELECT UNHEX(value) FROM json_each($1)) AND stored = bytes",
        postgres: "-- lock_named
            SELECT blob_pk, digest, bytes
            FROM blob
            WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM json_array_elements_text($1::json))) AND stored = bytes
            ORDER BY blob_pk
            FOR KEY SHARE",
    };
    if named.is_empty() {
        return Ok(HashMap::new());
    }
    let rows = tx.fetch_all(LOCK_NAMED, args![digest_list(named)]).await?;
    let named = |mut row: Row| {
        Ok((
            BlobDigest(row.get("digest")?),
            NamedBlob {
                blob_pk: BlobPk(row.get("blob_pk")?),
                bytes: row.get("bytes")?,
                kept: Kept::Rollout,
                is_column: false,
            },
        ))
    };
    rows.into_iter().map(named).collect()
}

/// Notes which rollouts name which blobs.
pub(super) async fn name(tx: &mut Tx<'_>, uses: &[(RolloutPk, NamedBlob)], now: Timestamp) -> Result<(), StoreError> {
    static INSERT_USES: InsertRows = InsertRows::new("insert_uses", "blob_use", "rollout_pk, blob_pk, kept");
    // In the order of their keys, as all who lock several. What rollouts give back early would else stay for a day, and that is
    // where the bytes are; a PUT asks for a day anew.
    const KEEP_NAMED: Statement = Statement {
        sqlite: "-- keep_named
            UPDATE blob
            SET expires_us = NULL, was_named = 1,
                kept_until_us = CASE
                    WHEN was_named = 0 AND blob_pk IN (SELECT value FROM json_each($2)) THEN MIN(kept_until_us, $3)
                    ELSE kept_until_us
                END
            WHERE blob_pk IN (SELECT value FROM json_each($1))
                AND (expires_us IS NOT NULL OR blob_pk IN (SELECT value FROM json_each($2)))",
        postgres: "-- keep_named
            UPDATE blob
            SET expires_us = NULL, was_named = 1,
                kept_until_us = CASE
                    WHEN was_named = 0 AND blob_pk = ANY ($2::bigint[]) THEN LEAST(kept_until_us, CAST($3 AS BIGINT))
                    ELSE kept_until_us
                END
            WHERE blob_pk = ANY (ARRAY(
                SELECT blob_pk
                FROM blob
                WHERE blob_pk = ANY ($1::bigint[]) AND (expires_us IS NOT NULL OR blob_pk = ANY ($2::bigint[]))
                ORDER BY blob_pk
                FOR NO KEY UPDATE
            ))",
    };
    if uses.is_empty() {
        return Ok(());
    }
    INSERT_USES
        .run(tx, uses.iter().map(|(rollout, named)| args![*rollout, named.blob_pk.0, named.kept.code()]).collect())
        .await?;
    let keys = |uses: &mut dyn Iterator<Item = &(RolloutPk, NamedBlob)>| {
        key_list(uses.map(|(_, named)| named.blob_pk.0).collect::<BTreeSet<i64>>())
    };
    let all = keys(&mut uses.iter());
    let early = keys(&mut uses.iter().filter(|(_, named)| named.kept < Kept::Rollout));
    tx.execute(KEEP_NAMED, args![all, early, now]).await.map(drop)
}

/// Notes that rollouts that keep nothing named columns. The columns are due at once, unless somebody has named them before:
/// they are no uploads that nobody has named, and would else stay for a day without any bound.
pub(super) async fn name_in_passing(tx: &mut Tx<'_>, columns: BTreeSet<i64>, now: Timestamp) -> Result<(), StoreError> {
    const NAME_IN_PASSING: Statement = Statement {
        sqlite: "-- name_in_passing
            UPDATE blob
            SET was_named = 1, kept_until_us = $2, expires_us = $2
            WHERE blob_pk IN (SELECT value FROM json_each($1)) AND was_named = 0",
        postgres: "-- name_in_passing
            UPDATE blob
            SET was_named = 1, kept_until_us = $2, expires_us = $2
            WHERE blob_pk = ANY (ARRAY(
                SELECT blob_pk
                FROM blob
                WHERE blob_pk = ANY ($1::bigint[]) AND was_named = 0
                ORDER BY blob_pk
                FOR NO KEY UPDATE
            ))",
    };
    if columns.is_empty() {
        return Ok(());
    }
    tx.execute(NAME_IN_PASSING, args![key_list(columns), now]).await.map(drop)
}

/// Gives back the columns that the rollouts of a batch keep until it is acked, and those that they keep until it is settled
/// if it is. Returns them: they are to expire when the transaction has locked all groups, as ingest has it.
pub(super) async fn release_columns(
    tx: &mut Tx<'_>,
    rules: &Rules,
    batch: BatchPk,
    is_settled: bool,
) -> Result<BTreeSet<i64>, StoreError> {
    // Rollouts that are not delivered keep theirs as long as their payloads.
    const DELETE_COLUMN_USES: Statement = Statement::new(
        "-- delete_column_uses
        DELETE FROM blob_use
        WHERE kept BETWEEN 1 AND $2
            AND rollout_pk IN (SELECT rollout_pk FROM rollout WHERE group_pk = $1 AND verdict IN ('kept', 'masked'))
        RETURNING blob_pk, (SELECT b.bytes FROM blob AS b WHERE b.blob_pk = blob_use.blob_pk) AS bytes",
    );
    // A batch that is delivered again counts without them.
    const SHRINK_GROUP: Statement = Statement::new(
        "-- shrink_group
        UPDATE rollout_group
        SET payload_bytes = payload_bytes - $2
        WHERE group_pk = $1",
    );
    const SHRINK_BATCH: Statement = Statement::new(
        "-- shrink_batch
        UPDATE batch
        SET live_bytes = live_bytes - $2
        WHERE batch_pk = $1",
    );
    if rules.columns.values().all(|rule| rule.retention == ColumnRetention::Rollout) {
        return Ok(BTreeSet::new());
    }
    let kept = if is_settled { Kept::Settled } else { Kept::Ack };
    let (mut blobs, mut total) = (BTreeSet::new(), 0);
    for group in batch::members(tx, batch).await? {
        let mut bytes = 0;
        for mut row in tx.fetch_all(DELETE_COLUMN_USES, args![group.group_pk, kept.code()]).await? {
            blobs.insert(row.get("blob_pk")?);
            bytes += row.get::<i64>("bytes")?;
        }
        if bytes > 0 {
            tx.guarded(SHRINK_GROUP, args![group.group_pk, bytes], 1).await?;
        }
        total += bytes;
    }
    if total > 0 {
        tx.guarded(SHRINK_BATCH, args![batch, total], 1).await?;
    }
    Ok(blobs)
}

/// Notes that rollouts name no blobs any more, because their payloads are gone.
pub(super) async fn release(tx: &mut Tx<'_>, rollouts: Vec<i64>, now: Timestamp) -> Result<(), StoreError> {
    const DELETE_USES: Statement = among_keys!(
        "-- delete_uses
        DELETE FROM blob_use
        WHERE rollout_pk",
        "
        RETURNING blob_pk"
    );
    if rollouts.is_empty() {
        return Ok(());
    }
    let mut blobs = BTreeSet::new();
    for mut row in tx.fetch_all(DELETE_USES, args![key_list(rollouts)]).await? {
        blobs.insert(row.get("blob_pk")?);
    }
    expire(tx, blobs, now).await
}

/// Makes blobs due that rollouts have given back. The sweep finds out whether others name them.
pub(super) async fn expire(tx: &mut Tx<'_>, blobs: BTreeSet<i64>, now: Timestamp) -> Result<(), StoreError> {
    const EXPIRE_RELEASED: Statement = Statement {
        sqlite: "-- expire_released
            UPDATE blob
            SET expires_us = MAX(kept_until_us, $2)
            WHERE blob_pk IN (SELECT value FROM json_each($1))",
        postgres: "-- expire_released
            UPDATE blob
            SET expires_us = GREATEST(kept_until_us, $2)
            WHERE blob_pk = ANY (ARRAY(
                SELECT blob_pk
                FROM blob
                WHERE blob_pk = ANY ($1::bigint[])
                ORDER BY blob_pk
                FOR NO KEY UPDATE
            ))",
    };
    if blobs.is_empty() {
        return Ok(());
    }
    tx.execute(EXPIRE_RELEASED, args![key_list(blobs), now]).await.map(drop)
}
