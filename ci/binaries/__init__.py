"""What shipped binaries say of the chips that they run on, without those chips."""
