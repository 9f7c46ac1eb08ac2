//! Tests the CRDs and admission policies on a real API server. Needs root.

mod admission;
mod api_server;
mod clustermesh;
mod peer;
mod peerpolicy;
mod sandbox;
