//! The object store of a Postgres database, as the database records it and the configuration wants it.

use forebay_telemetry::metrics::StoreMetrics;
use sqlx::{Connection as _, PgConnection, Row as _, postgres::PgConnectOptions};

use super::owner;
use crate::{
    open::{
        error::OpenError,
        options::{ObjectsClaim, PayloadKind, PayloadOptions},
    },
    segment_files::{Objects, new_store_id},
};

/// The object store of a database.
pub(super) struct Opened {
    /// Where payloads belong.
    pub(super) kind: PayloadKind,
    /// The store, if payloads are in it or will be.
    pub(super) objects: Option<Objects>,
}

/// Opens the object store, if payloads are in it or will be.
pub(super) async fn open(
    options: &PgConnectOptions,
    name: &str,
    payloads: PayloadOptions,
    metrics: &StoreMetrics,
) -> Result<Opened, OpenError> {
    let stores_objects = payloads.kind == Some(PayloadKind::Objects);
    let claim = payloads.objects_claim;
    let failed = |source| OpenError::Database { name: name.to_owned(), source };
    let mut connection = PgConnection::connect_with(options).await.map_err(failed)?;
    let mut transaction = connection.begin().await.map_err(failed)?;
    // Replicas may start at the same time. Statements have no names, because a pooler would keep them in its session.
    sqlx::raw_sql("LOCK TABLE payload_store IN EXCLUSIVE MODE").execute(&mut *transaction).await.map_err(failed)?;
    let row = sqlx::query("SELECT kind, store_id, url, identity FROM payload_store")
        .persistent(false)
        .fetch_optional(&mut *transaction)
        .await;
    let row = row.map_err(failed)?;
    let recorded = row.as_ref().map(|row| -> Result<(String, i64, Option<String>, Option<String>), sqlx::Error> {
        Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?))
    });
    let recorded = recorded.transpose().map_err(failed)?;
    let recorded_kind = recorded.as_ref().and_then(|(kind, ..)| PayloadKind::parse(kind));
    let kind = payloads.kind.or(recorded_kind).unwrap_or(PayloadKind::Database);
    let recorded_url = recorded.as_ref().and_then(|(_, _, url, _)| url.clone());
    let url = payloads.objects_url.or_else(|| recorded_url.clone());
    let settings = |why: String| OpenError::Settings(why);
    if kind == PayloadKind::Objects && url.is_none() {
        return Err(settings("payloads = \"objects\" needs the URL of an object store: objects.url".to_owned()));
    }
    let count = "SELECT COUNT(*), COUNT(*) FILTER (WHERE live_frames > 0) FROM segment_file";
    let counts = sqlx::query(count).persistent(false).fetch_one(&mut *transaction).await.map_err(failed)?;
    let (objects, named): (i64, i64) = (counts.try_get(0).map_err(failed)?, counts.try_get(1).map_err(failed)?);
    if recorded_url.is_some() && url != recorded_url && objects > 0 {
        let recorded = recorded_url.unwrap_or_default();
        return Err(settings(format!(
            "objects.url is another one than that of the stored payloads, {recorded}: move them into the database \
             first, with `forebay move-payloads database`"
        )));
    }
    let is_copy = match recorded.as_ref().and_then(|(.., identity)| identity.as_deref()) {
        Some(recorded) if stores_objects => recorded != owner::identity(&mut *transaction).await?,
        _ => false,
    };
    // A copy that needs no object of its original begins a folder of its own.
    let begins_folder = is_copy && named == 0 && claim != ObjectsClaim::Adopt;
    if begins_folder {
        let forget = "DELETE FROM segment_file; UPDATE payload_store SET identity = NULL";
        sqlx::raw_sql(forget).execute(&mut *transaction).await.map_err(failed)?;
    }
    let recorded_id = recorded.as_ref().map(|(_, store_id, ..)| *store_id).filter(|_| !begins_folder);
    let store_id = recorded_id.unwrap_or_else(|| i64::from(new_store_id()));
    let number = u32::try_from(store_id).map_err(|_| settings(format!("payload store {store_id} is damaged")))?;
    let open = |url| Objects::open(url, number, payloads.objects_cache_bytes, metrics.clone());
    let objects = url.as_deref().map(open).transpose();
    let objects = objects.map_err(|why| settings(format!("objects.url cannot be used: {why}")))?;
    let serves = payloads.kind.is_some();
    let objects = objects.map(|objects| if serves { objects } else { objects.without_waiting() });
    if let Some(objects) = objects.as_ref().filter(|_| stores_objects) {
        objects.check().await.map_err(|error| settings(format!("the object store cannot be used: {error}")))?;
    }
    if recorded.is_none() {
        sqlx::query("INSERT INTO payload_store (kind, store_id) VALUES ($1, $2)")
            .persistent(false)
            .bind(kind.as_str())
            .bind(store_id)
            .execute(&mut *transaction)
            .await
            .map_err(failed)?;
    }
    let record = "UPDATE payload_store SET kind = $1, store_id = $2, url = $3
        WHERE (kind, store_id, url) IS DISTINCT FROM ($1, $2, $3)";
    sqlx::query(record)
        .persistent(false)
        .bind(kind.as_str())
        .bind(store_id)
        .bind(url)
        .execute(&mut *transaction)
        .await
        .map_err(failed)?;
    transaction.commit().await.map_err(failed)?;
    connection.close().await.map_err(failed)?;
    Ok(Opened { kind, objects })
}
