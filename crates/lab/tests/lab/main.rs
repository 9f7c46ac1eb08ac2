//! Tests the lab itself, and the images with which it installs the product. Needs root.

mod clusters;
mod control_plane;
mod images;
mod nat;
