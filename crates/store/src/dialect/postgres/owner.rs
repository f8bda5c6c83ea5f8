//! Who may remove objects and add to them: the database says who it is, and its owner object repeats it.
//!
//! Separate from opening the object store, because ownership is proved again before objects are removed.

use sqlx::{PgExecutor, PgPool, Row as _, error::DatabaseError};

use crate::{
    open::{error::OpenError, options::ObjectsClaim},
    segment_files::{ObjectError, Objects, Owner, Standing, fence_step},
};

/// How often a proof is tried while other replicas prove the same. Each time, one of them succeeds.
const ATTEMPTS_MAX: usize = 16;

/// Objects cannot be claimed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClaimError {
    /// The role may not ask which server this is.
    #[error(
        "the role of the database URL may not run pg_control_system(), which tells a copy of the database from its \
         original. Run in this database: GRANT EXECUTE ON FUNCTION pg_control_system() TO the role"
    )]
    NotGranted,
    /// The objects belong to another database.
    #[error(
        "{}. Move the payloads of a copy into its database with `forebay move-payloads database`. If this database \
         replaces the other one, stop the other one and run `forebay serve --adopt-objects` once", .0.why()
    )]
    Taken(Standing),
    /// Others wrote the owner object during each attempt.
    #[error(
        "other processes changed the owner object each of the {ATTEMPTS_MAX} times that it was compared; try again"
    )]
    Changing,
    /// The database failed.
    #[error(transparent)]
    Database(sqlx::Error),
    /// The object store failed.
    #[error(transparent)]
    Objects(#[from] ObjectError),
}

impl From<sqlx::Error> for ClaimError {
    fn from(error: sqlx::Error) -> Self {
        let code = error.as_database_error().and_then(DatabaseError::code);
        if code.is_some_and(|code| code == "42501") { Self::NotGranted } else { Self::Database(error) }
    }
}

impl From<ClaimError> for OpenError {
    fn from(error: ClaimError) -> Self {
        Self::Settings(format!("the objects cannot be claimed: {error}"))
    }
}

/// What distinguishes a database from its copies: the number that its server's files were given when they were made, and
/// the number of the database in them. A physical replica has the same, so that nothing changes after a failover.
const IDENTITY: &str = "(SELECT system_identifier FROM pg_control_system()) || '/' || (
    SELECT oid FROM pg_database WHERE datname = current_database()
)";

pub(super) async fn identity(database: impl PgExecutor<'_>) -> Result<String, ClaimError> {
    let select = sqlx::AssertSqlSafe(format!("SELECT {IDENTITY}"));
    Ok(sqlx::query_scalar(select).persistent(false).fetch_one(database).await?)
}

/// Claims objects at the start.
pub(super) async fn claim(pool: &PgPool, objects: &Objects, claim: ObjectsClaim) -> Result<Standing, ClaimError> {
    match (prove(pool, objects, false).await?, claim) {
        (Standing::Owner, ObjectsClaim::Adopt) => {
            tracing::warn!("this database owns its objects already: start without --adopt-objects");
            Ok(Standing::Owner)
        }
        (standing, ObjectsClaim::Adopt) => adopt(pool, objects, standing).await,
        (standing, ObjectsClaim::Require) if standing != Standing::Owner => Err(ClaimError::Taken(standing)),
        (standing, _) => Ok(standing),
    }
}

/// Proves that the database owns its objects, or claims them if nobody has.
pub(super) async fn prove(pool: &PgPool, objects: &Objects, has_owned: bool) -> Result<Standing, ClaimError> {
    let identity = identity(pool).await?;
    for _ in 0..ATTEMPTS_MAX {
        if let Some(standing) = try_to_prove(pool, objects, has_owned, &identity).await? {
            return Ok(standing);
        }
    }
    Err(ClaimError::Changing)
}

/// None if it has to be compared again: nobody owned the objects and they were claimed, or the owner object has changed
/// between the two requests, because another replica has proved the same or another database has adopted the objects. With
/// every proof the fence rises: first in the database, so that a crash in between does not let the object be ahead.
async fn try_to_prove(
    pool: &PgPool,
    objects: &Objects,
    has_owned: bool,
    identity: &str,
) -> Result<Option<Standing>, ClaimError> {
    // The object is read first, because it is written last. The other way round, a proof of another replica in between
    // would look like one of a later state of the database.
    let found = objects.owner().await?;
    let recorded = recorded(pool).await?;
    let standing = Standing::of(identity, recorded.as_ref(), found.as_ref().map(|found| &found.owner));
    match (standing, recorded, found) {
        (Standing::Unclaimed, None, _) => {
            record_first(pool, &Owner::new(identity, None)).await?;
            Ok(None)
        }
        (Standing::Unclaimed, Some(recorded), _) => {
            objects.create_owner(&recorded).await?;
            Ok(None)
        }
        (Standing::Owner, Some(recorded), Some(found)) => {
            let Some(fence) = raise(pool, &recorded).await? else { return Ok(Some(Standing::Other)) };
            let replaced = objects.replace_owner(&found, &Owner { fence, ..recorded }).await?;
            Ok(replaced.then_some(standing))
        }
        // Whoever wrote the higher fence has to stop as well, because nothing shows which of the two is in use.
        (Standing::Earlier, _, Some(found)) if has_owned => {
            let contested = Owner { is_contested: true, ..found.owner.clone() };
            Ok(objects.replace_owner(&found, &contested).await?.then_some(Standing::Contested))
        }
        _ => Ok(Some(standing)),
    }
}

/// Makes the database the owner, whoever was it before. Of replicas that do this at once, a later one repeats what an
/// earlier one has recorded.
async fn adopt(pool: &PgPool, objects: &Objects, standing: Standing) -> Result<Standing, ClaimError> {
    let identity = identity(pool).await?;
    let (recorded, found) = (recorded(pool).await?, objects.owner().await?);
    let owner = match recorded {
        Some(recorded) if standing == Standing::Other && recorded.identity == identity => recorded,
        _ => Owner::new(&identity, found.as_ref().map(|found| &found.owner)),
    };
    sqlx::query("UPDATE payload_store SET identity = $1, incarnation = $2, fence = $3")
        .persistent(false)
        .bind(&owner.identity)
        .bind(owner.incarnation)
        .bind(owner.fence)
        .execute(pool)
        .await?;
    objects.write_owner(&owner).await?;
    tracing::warn!(
        "this database has adopted the objects; objects for which it has no row are removed in two hours, and removals \
         that the former owner has begun end within a minute"
    );
    Ok(Standing::Owner)
}

/// The owner that the database has recorded.
async fn recorded(pool: &PgPool) -> Result<Option<Owner>, ClaimError> {
    let select = "SELECT identity, incarnation, fence FROM payload_store WHERE identity IS NOT NULL";
    let row = sqlx::query(select).persistent(false).fetch_optional(pool).await?;
    let owner = row.map(|row| -> Result<Owner, sqlx::Error> {
        let (identity, incarnation, fence) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        Ok(Owner { identity, incarnation, fence, is_contested: false })
    });
    Ok(owner.transpose()?)
}

/// Records an owner, unless another replica has recorded one.
async fn record_first(pool: &PgPool, owner: &Owner) -> Result<(), ClaimError> {
    let record = "UPDATE payload_store SET identity = $1, incarnation = $2, fence = $3 WHERE identity IS NULL";
    let record = sqlx::query(record).persistent(false);
    let record = record.bind(&owner.identity).bind(owner.incarnation).bind(owner.fence);
    record.execute(pool).await?;
    Ok(())
}

/// Raises the fence. None if the database has recorded another owner meanwhile.
async fn raise(pool: &PgPool, owner: &Owner) -> Result<Option<i64>, ClaimError> {
    let raise = "UPDATE payload_store SET fence = fence + $1 WHERE identity = $2 AND incarnation = $3 RETURNING fence";
    let raise = sqlx::query_scalar(raise).persistent(false);
    let raise = raise.bind(fence_step()).bind(&owner.identity).bind(owner.incarnation);
    Ok(raise.fetch_optional(pool).await?)
}
