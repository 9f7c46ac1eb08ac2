//! The program `clustermesh-lab`. It runs as the supervisor of a lab and as pid 1 of each node. Users run `list`, `build` and `down`.
fn main() -> anyhow::Result<()> {
    clustermesh_lab::stages::main()
}
