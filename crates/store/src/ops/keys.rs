//! Keys: which caller may do what.
use async_trait::async_trait;
use forebay_domain::{
    access::{
        globs::PolicyGlobs,
        key::{KeyFilter, KeyHash, KeyId, KeyUse, NewKey, StoredKey},
    },
    clock::Timestamp,
    refusal::Refusal,
};

use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, args},
};

macro_rules! select_key {
    ($tail:literal) => {
        concat!(
            "-- select_key
            SELECT key_pk, key_id, name, role, policies, hash, created_us, expires_us, last_used_us, revoked_us
            FROM access_key ",
            $tail
        )
    };
}

fn read(mut row: Row) -> Result<StoredKey, StoreError> {
    let key_id: String = row.get("key_id")?;
    let corrupt = |what: &str| StoreError::Corrupt(format!("key `{key_id}` has {what}"));
    let policies: String = row.get("policies")?;
    let policies: Vec<&str> = policies.split(',').collect();
    Ok(StoredKey {
        key_pk: row.get("key_pk")?,
        key: NewKey {
            policies: PolicyGlobs::parse(&policies).map_err(|_| corrupt("policies that are not globs"))?,
            key_id: KeyId::parse(&key_id).ok_or_else(|| corrupt("an invalid id"))?,
            name: row.get("name")?,
            role: row.parse("role")?,
            hash: KeyHash::from_bytes(row.get("hash")?),
            created_at: row.get("created_us")?,
            expires_at: row.get("expires_us")?,
        },
        last_used_at: row.get("last_used_us")?,
        revoked_at: row.get("revoked_us")?,
    })
}

async fn find(tx: &mut Tx<'_>, key_id: &KeyId) -> Result<Option<StoredKey>, StoreError> {
    const FIND_KEY: Statement = Statement::new(select_key!("WHERE key_id = $1"));
    tx.fetch_optional(FIND_KEY, args![key_id.as_str()]).await?.map(read).transpose()
}

pub struct CreateKey {
    pub key: NewKey,
    pub live_max: u32,
}

#[async_trait]
impl Op for CreateKey {
    type Output = Result<StoredKey, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // Replicas that count at the same time may each exceed the bound by one. That is harmless, because it only
        // bounds memory.
        const INSERT_KEY: Statement = Statement::new(
            "-- insert_key
            INSERT INTO access_key (key_id, name, role, policies, hash, created_us, expires_us)
            SELECT $1, $2, $3, $4, $5, $6, $7
            WHERE (SELECT COUNT(*) FROM access_key WHERE revoked_us IS NULL) < $8",
        );
        let key = &self.key;
        let insert = args![
            key.key_id.as_str(),
            key.name.as_str(),
            key.role.as_str(),
            key.policies.to_string(),
            key.hash.as_bytes(),
            key.created_at,
            key.expires_at,
            self.live_max,
        ];
        if tx.execute(INSERT_KEY, insert).await? == 0 {
            return Ok(Err(Refusal::TooManyKeys(self.live_max)));
        }
        let stored = find(tx, &key.key_id).await?;
        Ok(Ok(stored.ok_or_else(|| StoreError::Corrupt("a key that was just written is missing".to_owned()))?))
    }
}

pub struct ListKeys(pub KeyFilter);

#[async_trait]
impl Op for ListKeys {
    type Output = Vec<StoredKey>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const LIST_KEYS: Statement = Statement::new(select_key!("WHERE key_pk > $1 ORDER BY key_pk LIMIT $2"));
        const LIST_LIVE_KEYS: Statement =
            Statement::new(select_key!("WHERE key_pk > $1 AND revoked_us IS NULL ORDER BY key_pk LIMIT $2"));
        let KeyFilter { live_only, after, limit } = self.0;
        let statement = if live_only { LIST_LIVE_KEYS } else { LIST_KEYS };
        tx.fetch_all(statement, args![after, limit]).await?.into_iter().map(read).collect()
    }
}

pub struct RevokeKey {
    pub key_id: KeyId,
    pub now: Timestamp,
}

#[async_trait]
impl Op for RevokeKey {
    type Output = Option<StoredKey>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // A key is revoked only once. A repeated call keeps the first time.
        const REVOKE_KEY: Statement = Statement::new(
            "-- revoke_key
            UPDATE access_key
            SET revoked_us = $2
            WHERE key_id = $1 AND revoked_us IS NULL",
        );
        tx.execute(REVOKE_KEY, args![self.key_id.as_str(), self.now]).await?;
        find(tx, &self.key_id).await
    }
}

pub struct WriteKeyUses(pub Vec<KeyUse>);

#[async_trait]
impl Op for WriteKeyUses {
    type Output = ();

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        // Another replica may have stored a later use of the key.
        const WRITE_KEY_USE: Statement = Statement::new(
            "-- write_key_use
            UPDATE access_key
            SET last_used_us = $2
            WHERE key_id = $1 AND (last_used_us IS NULL OR last_used_us < $2)",
        );
        // Rows are locked in the order of the ids on every replica.
        let mut uses: Vec<_> = self.0.iter().collect();
        uses.sort_by_key(|key_use| &key_use.key_id);
        for key_use in uses {
            tx.execute(WRITE_KEY_USE, args![key_use.key_id.as_str(), key_use.used_at]).await?;
        }
        Ok(())
    }
}
