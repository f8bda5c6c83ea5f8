//! Steps before the first transaction: the settings are checked, and the schema is brought up to date.

use sqlx::{
    Connection as _, PgConnection, Row as _, error::DatabaseError, migrate::MigrateError, postgres::PgConnectOptions,
};

use crate::open::error::OpenError;

/// Begins the transaction of the migrations. If several replicas start at once, each waits until the one before is
/// done.
///
/// The lock ends with the transaction. A lock of a session would stay behind in a pooler's session. Named statements
/// that others left in the session would conflict with the migrator's. Notices that tables already exist are not
/// useful.
const BEGIN: &str = "
    BEGIN ISOLATION LEVEL READ COMMITTED;
    SET LOCAL client_min_messages = 'error';
    DEALLOCATE ALL;
    SELECT pg_advisory_xact_lock(7308896101216);
";

/// How often the migrations begin again after a deadlock.
const DEADLOCKS_MAX: u32 = 5;

/// Checks and migrates on connections of their own, so that the error of a database that cannot be reached is reported
/// unchanged.
pub(super) async fn prepare(options: &PgConnectOptions, name: &str) -> Result<(), OpenError> {
    let database = |source| OpenError::Database { name: name.to_owned(), source };
    let mut connection = PgConnection::connect_with(options).await.map_err(database)?;
    for (setting, show) in [("fsync", "SHOW fsync"), ("synchronous_commit", "SHOW synchronous_commit")] {
        check_setting(&mut connection, setting, show).await?;
    }
    connection.close().await.map_err(database)?;
    let mut deadlocks = 0;
    while let Err(source) = migrate(options).await {
        if !is_deadlock(&source) || deadlocks == DEADLOCKS_MAX {
            return Err(OpenError::schema(name, source));
        }
        deadlocks += 1;
        tracing::warn!(deadlocks, "the migrations were undone by a deadlock with a running replica, and begin again");
    }
    Ok(())
}

/// Runs the steps that are missing, all of them or none.
async fn migrate(options: &PgConnectOptions) -> Result<(), MigrateError> {
    // The migrator names its statements, and BEGIN removes those that the session had. So each attempt has a connection
    // of its own.
    let mut connection = PgConnection::connect_with(options).await?;
    let mut migrator = sqlx::migrate!("../../migrations/postgres");
    migrator.set_locking(false);
    let mut transaction = connection.begin_with(BEGIN).await?;
    migrator.run_direct(None, &mut *transaction, false).await?;
    // A pooler would keep the named statements in its session.
    sqlx::raw_sql("DEALLOCATE ALL").execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(connection.close().await?)
}

/// Whether Postgres ended the migrations because they and another transaction waited for each other. They lock tables in
/// another order than requests do.
fn is_deadlock(error: &MigrateError) -> bool {
    let (MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _)) = error else { return false };
    source.as_database_error().and_then(DatabaseError::code).is_some_and(|code| code == "40P01")
}

async fn check_setting(connection: &mut PgConnection, setting: &str, show: &'static str) -> Result<(), OpenError> {
    let failed = |error: sqlx::Error| OpenError::Settings(error.to_string());
    let row = sqlx::raw_sql(show).fetch_one(connection).await.map_err(failed)?;
    let value: String = row.try_get(0).map_err(failed)?;
    if value == "off" {
        return Err(OpenError::Settings(format!(
            "Postgres runs with {setting}=off: acknowledged trajectories would be lost in a crash"
        )));
    }
    Ok(())
}
