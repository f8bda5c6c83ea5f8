//! Who may remove objects and add to them: the database says who it is, and its owner object repeats it.
//!
//! Separate from opening the object store, because ownership is proved again before objects are removed.

use sqlx::{PgConnection, Row as _, error::DatabaseError};

use crate::store::{
    ObjectsClaim,
    segment_files::{ObjectError, Objects, Owner, Standing, fence_step},
};

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

/// What distinguishes a database from its copies: the number that its server's files were given when they were made, and
/// the number of the database in them. A physical replica has the same, so that nothing changes after a failover.
const IDENTITY: &str = "(SELECT system_identifier FROM pg_control_system()) || '/' || (
    SELECT oid FROM pg_database WHERE datname = current_database()
)";

/// The identity of the database.
pub(super) async fn identity(connection: &mut PgConnection) -> Result<String, ClaimError> {
    let select = sqlx::AssertSqlSafe(format!("SELECT {IDENTITY}"));
    Ok(sqlx::query_scalar(select).persistent(false).fetch_one(connection).await?)
}

/// Claims objects at the start.
pub(super) async fn claim(
    connection: &mut PgConnection,
    objects: &Objects,
    claim: ObjectsClaim,
) -> Result<Standing, ClaimError> {
    match (prove(connection, objects, false).await?, claim) {
        (Standing::Owner, ObjectsClaim::Adopt) => {
            tracing::warn!("this database owns its objects already: start without --adopt-objects");
            Ok(Standing::Owner)
        }
        (standing, ObjectsClaim::Adopt) => adopt(connection, objects, standing).await,
        (standing, ObjectsClaim::Require) if standing != Standing::Owner => Err(ClaimError::Taken(standing)),
        (standing, _) => Ok(standing),
    }
}

/// Proves that the database owns its objects, or claims them if nobody has. With every proof the fence rises: first in
/// the database, so that a crash in between does not let the object be ahead.
pub(super) async fn prove(
    connection: &mut PgConnection,
    objects: &Objects,
    has_owned: bool,
) -> Result<Standing, ClaimError> {
    let identity = identity(connection).await?;
    let mut recorded = recorded(connection).await?;
    let mut found = objects.owner().await?;
    if Standing::of(&identity, recorded.as_ref(), found.as_ref()) == Standing::Unclaimed {
        if recorded.is_none() {
            record_first(connection, &Owner::new(&identity, None)).await?;
            recorded = self::recorded(connection).await?;
        }
        if let Some(owner) = &recorded {
            objects.create_owner(owner).await?;
        }
        // Another database may have created it at the same time.
        found = objects.owner().await?;
    }
    let standing = Standing::of(&identity, recorded.as_ref(), found.as_ref());
    match (standing, recorded, found) {
        (Standing::Owner, Some(recorded), _) => {
            let Some(fence) = raise(connection, &recorded).await? else { return Ok(Standing::Other) };
            objects.write_owner(&Owner { fence, ..recorded }).await?;
        }
        // Whoever wrote the higher fence has to stop as well, because nothing shows which of the two is in use.
        (Standing::Earlier, _, Some(found)) if has_owned => {
            objects.write_owner(&Owner { is_contested: true, ..found }).await?;
            return Ok(Standing::Contested);
        }
        _ => {}
    }
    Ok(standing)
}

/// Makes the database the owner, whoever was it before. Of replicas that do this at once, a later one repeats what an
/// earlier one has recorded.
async fn adopt(connection: &mut PgConnection, objects: &Objects, standing: Standing) -> Result<Standing, ClaimError> {
    let identity = identity(connection).await?;
    let (recorded, found) = (recorded(connection).await?, objects.owner().await?);
    let owner = match recorded {
        Some(recorded) if standing == Standing::Other && recorded.identity == identity => recorded,
        _ => Owner::new(&identity, found.as_ref()),
    };
    sqlx::query("UPDATE payload_store SET identity = $1, incarnation = $2, fence = $3")
        .persistent(false)
        .bind(&owner.identity)
        .bind(owner.incarnation)
        .bind(owner.fence)
        .execute(connection)
        .await?;
    objects.write_owner(&owner).await?;
    tracing::warn!("this database has adopted the objects; objects for which it has no row are removed in two hours");
    Ok(Standing::Owner)
}

/// The owner that the database has recorded.
async fn recorded(connection: &mut PgConnection) -> Result<Option<Owner>, ClaimError> {
    let select = "SELECT identity, incarnation, fence FROM payload_store WHERE identity IS NOT NULL";
    let row = sqlx::query(select).persistent(false).fetch_optional(connection).await?;
    let owner = row.map(|row| -> Result<Owner, sqlx::Error> {
        let (identity, incarnation, fence) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        Ok(Owner { identity, incarnation, fence, is_contested: false })
    });
    Ok(owner.transpose()?)
}

/// Records an owner, unless another replica has recorded one.
async fn record_first(connection: &mut PgConnection, owner: &Owner) -> Result<(), ClaimError> {
    let record = "UPDATE payload_store SET identity = $1, incarnation = $2, fence = $3 WHERE identity IS NULL";
    let record = sqlx::query(record).persistent(false);
    let record = record.bind(&owner.identity).bind(owner.incarnation).bind(owner.fence);
    record.execute(connection).await?;
    Ok(())
}

/// Raises the fence. None if the database has recorded another owner meanwhile.
async fn raise(connection: &mut PgConnection, owner: &Owner) -> Result<Option<i64>, ClaimError> {
    let raise = "UPDATE payload_store SET fence = fence + $1 WHERE identity = $2 AND incarnation = $3 RETURNING fence";
    let raise = sqlx::query_scalar(raise).persistent(false);
    let raise = raise.bind(fence_step()).bind(&owner.identity).bind(owner.incarnation);
    Ok(raise.fetch_optional(connection).await?)
}
