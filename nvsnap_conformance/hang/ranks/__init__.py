"""Many ranks at little cost: processes forked from one server that has torch loaded."""
