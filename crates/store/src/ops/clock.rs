//! The clock that replicas share, in one row: the offset to the database's clock, and the time that the service has
//! reached.
use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    service_time::{ClockReading, CorrectClock},
};

use crate::{
    error::StoreError,
    op::Op,
    sql::{Statement, Tx, args},
};

/// Reads the clock, and the time that the service has reached.
pub struct ReadClock;

#[async_trait]
impl Op for ReadClock {
    type Output = ClockReading;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<ClockReading, StoreError> {
        // A SQLite database belongs to one process, which has its own clock.
        const READ_CLOCK: Statement = Statement {
            sqlite: "-- read_clock
                SELECT NULL AS database_us, c.offset_us, c.latest_us, c.asked, c.answered
                FROM (SELECT 1 AS number) AS one
                LEFT JOIN service_clock AS c ON c.only_row = one.number",
            postgres: "-- read_clock
                SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT) AS database_us, c.offset_us,
                    c.latest_us, c.asked, c.answered
                FROM (SELECT 1 AS number) AS one
                LEFT JOIN service_clock AS c ON c.only_row = one.number",
        };
        let mut row = tx.fetch_one(READ_CLOCK, args![]).await?;
        Ok(ClockReading {
            database: row.get("database_us")?,
            offset_us: row.get::<Option<i64>>("offset_us")?.unwrap_or(0),
            latest: row.get("latest_us")?,
            asked: row.get::<Option<i64>>("asked")?.unwrap_or(0),
            answered: row.get::<Option<i64>>("answered")?.unwrap_or(0),
        })
    }
}

pub(crate) struct MarkClock {
    pub now: Timestamp,
    pub answers: Option<i64>,
}

#[async_trait]
impl Op for MarkClock {
    type Output = ();

    const IS_WORK: bool = false;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        const MARK_CLOCK: Statement = Statement::new(
            "-- mark_clock
            INSERT INTO service_clock (only_row, offset_us, latest_us, asked, answered)
            VALUES (1, 0, $1, 0, 0)
            ON CONFLICT (only_row) DO UPDATE SET
                latest_us = CASE
                    WHEN service_clock.latest_us < excluded.latest_us THEN excluded.latest_us
                    ELSE service_clock.latest_us
                END,
                answered = CASE WHEN service_clock.answered < $2 THEN $2 ELSE service_clock.answered END",
        );
        tx.execute(MARK_CLOCK, args![self.now, self.answers.unwrap_or(0)]).await.map(drop)
    }
}

#[async_trait]
impl Op for CorrectClock {
    type Output = bool;

    const IS_WORK: bool = false;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<bool, StoreError> {
        // If several replicas detect the same step, only one of them corrects the offset.
        const CORRECT_CLOCK: Statement = Statement::new(
            "-- correct_clock
            UPDATE service_clock
            SET offset_us = $2, latest_us = CASE WHEN latest_us < $3 THEN $3 ELSE latest_us END
            WHERE only_row = 1 AND offset_us = $1",
        );
        Ok(tx.execute(CORRECT_CLOCK, args![self.from_us, self.to_us, self.now]).await? == 1)
    }
}

pub struct AskClock;

#[async_trait]
impl Op for AskClock {
    type Output = i64;

    const IS_WORK: bool = false;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<i64, StoreError> {
        const ASK_CLOCK: Statement = Statement::new(
            "-- ask_clock
            UPDATE service_clock
            SET asked = asked + 1
            WHERE only_row = 1
            RETURNING asked",
        );
        tx.fetch_one(ASK_CLOCK, args![]).await?.get("asked")
    }
}
