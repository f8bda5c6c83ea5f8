//! The object store of a Postgres database, as the database records it and the configuration wants it.

use sqlx::{Connection as _, PgConnection, Row as _, postgres::PgConnectOptions};

use crate::{
    metrics::StoreMetrics,
    store::{
        OpenError, PayloadKind, PayloadOptions,
        segment_files::{Objects, new_store_id},
    },
};

/// Opens the object store, if payloads are in it or will be. Returns where new payloads are stored.
pub(super) async fn open(
    options: &PgConnectOptions,
    name: &str,
    payloads: PayloadOptions,
    metrics: &StoreMetrics,
) -> Result<(PayloadKind, Option<Objects>), OpenError> {
    let failed = |source| OpenError::Database { name: name.to_owned(), source };
    let mut connection = PgConnection::connect_with(options).await.map_err(failed)?;
    let mut transaction = connection.begin().await.map_err(failed)?;
    // Replicas may start at the same time. Statements have no names, because a pooler would keep them in its session.
    sqlx::raw_sql("LOCK TABLE payload_store IN EXCLUSIVE MODE").execute(&mut *transaction).await.map_err(failed)?;
    let row = sqlx::query("SELECT kind, store_id, url FROM payload_store")
        .persistent(false)
        .fetch_optional(&mut *transaction)
        .await;
    let row = row.map_err(failed)?;
    let recorded = row.as_ref().map(|row| -> Result<(String, i64, Option<String>), sqlx::Error> {
        Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?))
    });
    let recorded = recorded.transpose().map_err(failed)?;
    let recorded_kind = recorded.as_ref().and_then(|(kind, ..)| PayloadKind::parse(kind));
    let kind = payloads.kind.or(recorded_kind).unwrap_or(PayloadKind::Database);
    let recorded_url = recorded.as_ref().and_then(|(.., url)| url.clone());
    let url = payloads.objects_url.or_else(|| recorded_url.clone());
    let settings = |why: String| OpenError::Settings(why);
    if kind == PayloadKind::Objects && url.is_none() {
        return Err(settings("payloads = \"objects\" needs the URL of an object store: objects.url".to_owned()));
    }
    if recorded_url.is_some() && url != recorded_url {
        let has_objects: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM segment_file)")
            .persistent(false)
            .fetch_one(&mut *transaction)
            .await
            .map_err(failed)?;
        if has_objects {
            let recorded = recorded_url.unwrap_or_default();
            return Err(settings(format!(
                "objects.url is another one than that of the stored payloads, {recorded}: move them into the database \
                 first, with `forebay move-payloads database`"
            )));
        }
    }
    let store_id = recorded.as_ref().map_or_else(|| i64::from(new_store_id()), |(_, store_id, _)| *store_id);
    let number = u32::try_from(store_id).map_err(|_| settings(format!("payload store {store_id} is damaged")))?;
    let open = |url| Objects::open(url, number, payloads.objects_cache_bytes, metrics.clone());
    let objects = url.as_deref().map(open).transpose();
    let objects = objects.map_err(|why| settings(format!("objects.url cannot be used: {why}")))?;
    if let Some(objects) = objects.as_ref().filter(|_| kind == PayloadKind::Objects) {
        objects.check().await.map_err(|error| settings(format!("the object store cannot be used: {error}")))?;
    }
    if recorded.is_none_or(|(recorded, _, recorded_url)| recorded != kind.as_str() || recorded_url != url) {
        sqlx::query("DELETE FROM payload_store").persistent(false).execute(&mut *transaction).await.map_err(failed)?;
        sqlx::query("INSERT INTO payload_store (kind, store_id, url) VALUES ($1, $2, $3)")
            .persistent(false)
            .bind(kind.as_str())
            .bind(store_id)
            .bind(url)
            .execute(&mut *transaction)
            .await
            .map_err(failed)?;
    }
    transaction.commit().await.map_err(failed)?;
    connection.close().await.map_err(failed)?;
    Ok((kind, objects))
}
