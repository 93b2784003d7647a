"""How waiting and running requests are ranked; one small pure object each."""
