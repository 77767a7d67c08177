//! Migrations are read at compile time: a new file must compile the crate anew.
fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
