"""What runs in the environment of nvidia-modelopt; nothing of the mesh imports it."""
