//! Steps before the first transaction: the settings are checked, and the schema is brought up to date.

use sqlx::{Connection as _, PgConnection, Row as _, migrate::MigrateError, postgres::PgConnectOptions};

use crate::store::OpenError;

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

/// Checks and migrates on a connection of its own, so that the error of a database that cannot be reached is reported
/// unchanged.
pub(super) async fn prepare(options: &PgConnectOptions, name: &str) -> Result<(), OpenError> {
    let database = |source| OpenError::Database { name: name.to_owned(), source };
    let mut connection = PgConnection::connect_with(options).await.map_err(database)?;
    for (setting, show) in [("fsync", "SHOW fsync"), ("synchronous_commit", "SHOW synchronous_commit")] {
        check_setting(&mut connection, setting, show).await?;
    }
    let mut transaction = connection.begin_with(BEGIN).await.map_err(database)?;
    migrate(&mut transaction).await.map_err(|source| OpenError::schema(name, source))?;
    // The migrator names its statements, and a pooler would keep them in its session.
    sqlx::raw_sql("DEALLOCATE ALL").execute(&mut *transaction).await.map_err(database)?;
    transaction.commit().await.map_err(database)?;
    connection.close().await.map_err(database)
}

async fn migrate(connection: &mut PgConnection) -> Result<(), MigrateError> {
    let mut migrator = sqlx::migrate!("migrations/postgres");
    migrator.set_locking(false);
    migrator.run_direct(None, connection, false).await
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
