//! The program `clustermesh-lab`: the supervisor, the first process of each node, and `list`/`down` for people.
fn main() -> anyhow::Result<()> {
    clustermesh_lab::stages::main()
}
