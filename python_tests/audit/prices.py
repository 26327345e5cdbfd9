"""Made-up seconds of the pieces of a step, by which tests reckon."""

COSTS = {
    "fprop dense": 10.0,
    "dgrad dense": 11.0,
    "wgrad dense": 12.0,
    "fprop sparse": 6.0,
    "dgrad sparse": 7.0,
    "wgrad sparse": 8.0,
    "estimate": 1.0,
    "expand": 2.0,
    "weight dense": 0.5,
    "weight rows": 0.75,
    "weight rows+dense": 1.25,
    "weight both": 2.0,
}
