//! What requests and replicas share: who waits for what, notifications between replicas, and the clock.

pub(in crate::buffer) mod wakers;

pub(in crate::buffer) mod waiter_slots;

pub(in crate::buffer) mod askers;

pub mod replicas;

pub(in crate::buffer) mod service_time;
